// What Python sees.
#include "calls.hpp"

namespace pccl {

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
