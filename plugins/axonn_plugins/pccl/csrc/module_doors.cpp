// What Python sees of how links are made. Nothing here holds the interpreter's lock while it waits.
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

}  // namespace

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

}  // namespace pccl
