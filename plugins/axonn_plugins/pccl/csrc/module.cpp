// What Python sees. Nothing of how links are made holds the interpreter's lock while it waits.
#include "calls.hpp"
#include "doors.hpp"

namespace pccl {
namespace {

Identity identity(const std::string& bytes) {
  Identity made{};
  if (bytes.size() != made.size()) throw std::invalid_argument("an identity has 16 bytes");
  std::copy(bytes.begin(), bytes.end(), made.begin());
  return made;
}

// A forked child has no such thread to wait for, and its parent's sockets are closed in it.
std::shared_ptr<Doors> open(std::shared_ptr<Core> core, std::vector<std::string> hosts, double silence, bool lets_read) {
  std::shared_ptr<Engine> engine(core, &core->engine);
  return {new Doors(std::move(engine), std::move(hosts), silence, lets_read), [process = getpid()](Doors* doors) {
            if (getpid() == process) delete doors;
          }};
}

// Why there is no link, and whether the peer has gone; or nothing.
std::optional<std::pair<std::string, bool>> connect(Doors& doors, uint64_t group, const Doors::Peer& peer, double timeout) {
  try {
    doors.connect(group, peer, timeout);
  } catch (const NoLink& error) {
    return std::pair(std::string(error.what()), error.gone);
  }
  return std::nullopt;
}

void define_doors(py::module_& module) {
  using Free = py::call_guard<py::gil_scoped_release>;
  py::class_<Doors::Peer>(module, "Peer").def(
      py::init([](const py::bytes& who, bool near, std::string name, std::vector<std::pair<std::string, int>> addresses) {
        return Doors::Peer{identity(who), near, std::move(name), std::move(addresses)};
      }));
  py::class_<Doors, std::shared_ptr<Doors>>(module, "Doors")
      .def(py::init(&open), Free())
      .def_property_readonly("identity", [](const Doors& doors) { return py::bytes(doors.identity().data(), doors.identity().size()); })
      .def_property_readonly("name", &Doors::name)
      .def_property_readonly("addresses", &Doors::addresses)
      .def("join", [](Doors& doors, const py::bytes& secret, double timeout) { return doors.join(secret, timeout); })
      .def("number", [](Doors& doors, const py::bytes& who) { return doors.number(identity(who)); })
      .def("connect", &connect, Free())
      .def("gone", &Doors::gone, Free());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Program, std::shared_ptr<Program>>(module, "Program")
      .def(py::init([](int size, int rank, int chunks, int work_slots, uint32_t digest, const std::vector<int32_t>& ops,
                       const std::vector<int32_t>& spans, const std::vector<int32_t>& after, bool desks) {
        auto made = std::make_shared<Program>(Program::parse(size, rank, chunks, work_slots, digest, ops, spans, after));
        made->desks = desks;
        return made;
      }));
  py::class_<Core, std::shared_ptr<Core>>(module, "Core")
      // Never destroyed: its threads may need the interpreter, which may be gone by then, and a forked child has none of them.
      .def(py::init([] { return std::shared_ptr<Core>(new Core, [](Core*) {}); }))
      .def("close", [](Core& core) { core.finisher->close(); }, py::call_guard<py::gil_scoped_release>())
      .def("linked", [](Core& core, int peer) { return core.engine.linked(peer); })
      .def("add_group", [](Core& core, uint64_t key, std::vector<int> peers, std::vector<int> ranks, int rank, double timeout) {
        core.engine.add_group(key, std::move(peers), std::move(ranks), rank, timeout);
      })
      .def("questions", [](Core& core) { return core.engine.questions(); })
      .def("laid", [](Core& core) { return core.engine.laid(); })
      .def("broken", [](Core& core, uint64_t key) { return core.engine.broken(key); })
      .def("give_up", [](Core& core, uint64_t key, const std::string& why) { core.engine.give_up(key, why); });
  module.def("backend", [](std::shared_ptr<Core> core, uint64_t key, int rank, int size, double timeout,
                           py::object plan) -> BackendPointer {
    return make_shim(std::move(core), key, rank, size, timeout, std::move(plan));
  });
  // Of a backend that hands its CPU tensors on, those of the one that has them.
  auto planned = [](const BackendPointer& backend) -> Planned& {
    auto* found = dynamic_cast<Planned*>(backend.get());
    if (auto* router = dynamic_cast<Delegate*>(backend.get()); router && !found) found = dynamic_cast<Planned*>(router->inner().get());
    TORCH_CHECK(found, "pccl: the group's backend ", backend->getBackendName(), " is none of pccl's");
    return *found;
  };
  module.def("planner", [planned](const BackendPointer& backend) { return planned(backend).planner(); });
  module.def("forget", [planned](const BackendPointer& backend) { planned(backend).forget(); });
  define_device(module);
  define_router(module);
  define_doors(module);
}

}  // namespace pccl
