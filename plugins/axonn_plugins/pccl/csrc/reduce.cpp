#include "reduce.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace pccl {
namespace {

template <class To, class From>
To bits(From value) {
  return std::bit_cast<To>(value);
}

struct BF16 {
  uint16_t value;
  operator float() const { return bits<float>(uint32_t{value} << 16); }
  static BF16 from(float value) {
    uint32_t wide = bits<uint32_t>(value);
    if (value != value) return {static_cast<uint16_t>((wide >> 16) | 0x40)};
    return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
  }
};

// Without a branch, which would keep the compiler from doing several numbers at once.
uint32_t pick(bool first, uint32_t one, uint32_t other) {
  uint32_t mask = 0u - uint32_t{first};
  return (one & mask) | (other & ~mask);
}

// By hand: the compiler's own conversions are a function's call for each number, unless it is told of a processor that has them.
struct F16 {
  static constexpr uint32_t kShift = 13, kBias = 112u << 23;  // a float's exponent less a half's
  uint16_t value;
  operator float() const {
    uint32_t sign = (value & 0x8000u) << 16, rest = value & 0x7fffu;
    uint32_t normal = (rest << kShift) + kBias, special = (rest << kShift) | 0x7f800000u;
    uint32_t small = bits<uint32_t>(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
    return bits<float>(sign | pick(rest < 0x400, small, pick(rest < 0x7c00, normal, special)));
  }
  static F16 from(float wide) {
    uint32_t all = bits<uint32_t>(wide), sign = all >> 16 & 0x8000u, rest = all & 0x7fffffffu;
    uint32_t normal = (rest + 0xfff + (rest >> kShift & 1) - kBias) >> kShift;
    uint32_t small = bits<uint32_t>(bits<float>(rest) + 0.5f) - bits<uint32_t>(0.5f);  // whose last place is 2^-24
    uint32_t special = 0x7c00u | pick(rest > 0x7f800000u, 0x200u | (rest >> kShift & 0x3ffu), 0);
    return {static_cast<uint16_t>(sign | pick(rest < 0x38800000u, small, pick(rest < 0x47800000u, normal, special)))};
  }
};

// torch's rule for bool: a sum is an or, a product an and.
struct Bool {
  uint8_t value;
};

template <class T>
struct Arithmetic {
  using Wide = T;
  static T narrow(Wide value) { return value; }
};
template <>
struct Arithmetic<BF16> {
  using Wide = float;
  static BF16 narrow(float value) { return BF16::from(value); }
};
template <>
struct Arithmetic<F16> {
  using Wide = float;
  static F16 narrow(float value) { return F16::from(value); }
};
template <>
struct Arithmetic<int64_t> {  // sums of integers wrap, which only unsigned arithmetic may
  using Wide = uint64_t;
  static int64_t narrow(uint64_t value) { return static_cast<int64_t>(value); }
};
template <>
struct Arithmetic<int32_t> {
  using Wide = uint32_t;
  static int32_t narrow(uint32_t value) { return static_cast<int32_t>(value); }
};
template <>
struct Arithmetic<uint16_t> {
  using Wide = uint32_t;
  static uint16_t narrow(uint32_t value) { return static_cast<uint16_t>(value); }
};
template <>
struct Arithmetic<int16_t> {
  using Wide = uint32_t;
  static int16_t narrow(uint32_t value) { return static_cast<int16_t>(value); }
};

template <class T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <class T, class F>
void each(void* to, const void* mine, const void* theirs, size_t elements, F apply) {
  char* out = static_cast<char*>(to);
  const char* a = static_cast<const char*>(mine);
  const char* b = static_cast<const char*>(theirs);
  for (size_t i = 0; i < elements * sizeof(T); i += sizeof(T)) {
    T value = apply(load<T>(a + i), load<T>(b + i));
    std::memcpy(out + i, &value, sizeof value);
  }
}

template <class T>
bool is_nan(T value) {
  return value != value;
}

template <class T>
bool is_negative(T value) {
  if constexpr (std::is_integral_v<T>) return false;
  else if constexpr (std::is_same_v<T, double>) return std::signbit(value);
  else return std::signbit(static_cast<float>(value));
}

template <class T>
constexpr bool kWhole = std::is_integral_v<T>;

template <class T>
void typed(Reduction reduction, void* to, const void* mine, const void* theirs, size_t n) {
  using A = Arithmetic<T>;
  using W = typename A::Wide;
  switch (reduction) {
    case Reduction::kSum: case Reduction::kAverage: case Reduction::kWeighted:
      return each<T>(to, mine, theirs, n, [](T a, T b) { return A::narrow(static_cast<W>(a) + static_cast<W>(b)); });
    case Reduction::kProduct:
      return each<T>(to, mine, theirs, n, [](T a, T b) { return A::narrow(static_cast<W>(a) * static_cast<W>(b)); });
    // Either operand's NaN goes on, as in torch. Of zeros it is the one with the sign that fits, whichever is this rank's.
    case Reduction::kMin:
      return each<T>(to, mine, theirs, n, [](T a, T b) { return is_nan(a) || a < b || (a == b && is_negative(a)) ? a : b; });
    case Reduction::kMax:
      return each<T>(to, mine, theirs, n, [](T a, T b) { return is_nan(a) || a > b || (a == b && !is_negative(a)) ? a : b; });
    default: break;
  }
  if constexpr (kWhole<T>) {
    switch (reduction) {
      case Reduction::kAnd: return each<T>(to, mine, theirs, n, [](T a, T b) { return static_cast<T>(a & b); });
      case Reduction::kOr: return each<T>(to, mine, theirs, n, [](T a, T b) { return static_cast<T>(a | b); });
      case Reduction::kXor: return each<T>(to, mine, theirs, n, [](T a, T b) { return static_cast<T>(a ^ b); });
      default: return;
    }
  }
}

template <>
void typed<Bool>(Reduction reduction, void* to, const void* mine, const void* theirs, size_t n) {
  if (reduction == Reduction::kXor)
    each<Bool>(to, mine, theirs, n, [](Bool a, Bool b) { return Bool{static_cast<uint8_t>(!a.value != !b.value)}; });
  else if (reduction == Reduction::kSum || reduction == Reduction::kMax || reduction == Reduction::kOr)
    each<Bool>(to, mine, theirs, n, [](Bool a, Bool b) { return Bool{static_cast<uint8_t>(a.value || b.value)}; });
  else
    each<Bool>(to, mine, theirs, n, [](Bool a, Bool b) { return Bool{static_cast<uint8_t>(a.value && b.value)}; });
}

template <class T, class D = int>
void scaled(void* data, size_t elements, D divisor) {
  char* at = static_cast<char*>(data);
  using A = Arithmetic<T>;
  for (size_t i = 0; i < elements * sizeof(T); i += sizeof(T)) {
    T value = load<T>(at + i);
    if constexpr (std::is_signed_v<T> && std::is_integral_v<T>) value = static_cast<T>(value / static_cast<int64_t>(divisor));
    else value = A::narrow(static_cast<typename A::Wide>(value) / divisor);
    std::memcpy(at + i, &value, sizeof value);
  }
}

}  // namespace

void combine(Type type, Reduction reduction, void* to, const void* mine, const void* theirs, size_t n) {
  switch (type) {
    case Type::kF64: return typed<double>(reduction, to, mine, theirs, n);
    case Type::kF32: return typed<float>(reduction, to, mine, theirs, n);
    case Type::kBF16: return typed<BF16>(reduction, to, mine, theirs, n);
    case Type::kF16: return typed<F16>(reduction, to, mine, theirs, n);
    case Type::kI64: return typed<int64_t>(reduction, to, mine, theirs, n);
    case Type::kI32: return typed<int32_t>(reduction, to, mine, theirs, n);
    case Type::kI16: return typed<int16_t>(reduction, to, mine, theirs, n);
    case Type::kI8: return typed<int8_t>(reduction, to, mine, theirs, n);
    case Type::kU8: return typed<uint8_t>(reduction, to, mine, theirs, n);
    case Type::kBool: return typed<Bool>(reduction, to, mine, theirs, n);
    case Type::kU16: return typed<uint16_t>(reduction, to, mine, theirs, n);
    case Type::kU32: return typed<uint32_t>(reduction, to, mine, theirs, n);
    case Type::kU64: return typed<uint64_t>(reduction, to, mine, theirs, n);
    default: return;
  }
}

void divide(Type type, void* data, size_t elements, int divisor) {
  switch (type) {
    case Type::kF64: return scaled<double>(data, elements, divisor);
    case Type::kF32: return scaled<float>(data, elements, divisor);
    case Type::kBF16: return scaled<BF16>(data, elements, divisor);
    case Type::kF16: return scaled<F16>(data, elements, static_cast<float>(divisor) / static_cast<float>(halved(divisor)));
    case Type::kI64: return scaled<int64_t>(data, elements, divisor);
    case Type::kI32: return scaled<int32_t>(data, elements, divisor);
    case Type::kI16: return scaled<int16_t>(data, elements, divisor);
    case Type::kI8: return scaled<int8_t>(data, elements, divisor);
    case Type::kU8: return scaled<uint8_t>(data, elements, divisor);
    case Type::kU16: return scaled<uint16_t>(data, elements, divisor);
    case Type::kU32: return scaled<uint32_t>(data, elements, divisor);
    case Type::kU64: return scaled<uint64_t>(data, elements, divisor);
    default: return;
  }
}

bool can_reduce(Type type, Reduction reduction) {
  if (reduction == Reduction::kNone || type > Type::kU64) return false;
  bool floating = type <= Type::kF16, bits = reduction == Reduction::kAnd || reduction == Reduction::kOr || reduction == Reduction::kXor;
  return reduction == Reduction::kAverage ? type != Type::kBool : !(bits && floating);
}

}  // namespace pccl
