// All programs in one, so that headers are read once: programs NAME [ARGUMENT ...]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>

#include "digest.hpp"
#include "direct.hpp"
#include "peers.hpp"
#include "reading.hpp"

namespace collectives {
#include "collectives.cpp"
}
namespace exchanges {
#include "exchanges.cpp"
}
namespace fuzz {
#include "fuzz.cpp"
}
namespace halves {
#include "halves.cpp"
}
namespace inquiry {
#include "inquiry.cpp"
}
namespace places {
#include "places.cpp"
}
namespace secrets {
#include "secrets.cpp"
}
namespace torn {
#include "torn.cpp"
}

int main(int count, char** arguments) {
  const std::map<std::string, void (*)(int, char**)> programs{
      {"collectives", collectives::run}, {"exchanges", exchanges::run}, {"fuzz", fuzz::run},
      {"halves", halves::run},           {"inquiry", inquiry::run},     {"places", places::run},
      {"secrets", secrets::run},         {"torn", torn::run}};
  programs.at(arguments[1])(count - 1, arguments + 1);
}
