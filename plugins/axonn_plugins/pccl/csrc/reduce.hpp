// Elementwise combination of two buffers.
#pragma once

#include <bit>
#include <cstddef>

#include "frame.hpp"

namespace pccl {

// to[i] = mine[i] (+) theirs[i]; `to` may be `mine`. No pointer need be aligned.
void combine(Type type, Reduction reduction, void* to, const void* mine, const void* theirs, size_t elements);

// The power of two by which float16 is divided before a sum of `ranks` numbers that is to be an average.
inline unsigned halved(int ranks) { return std::bit_ceil(static_cast<unsigned>(ranks)); }

// data[i] /= divisor, of float16 by what is left of it behind `halved`; whole numbers are cut towards zero, as NCCL's averages are.
void divide(Type type, void* data, size_t elements, int divisor);

bool can_reduce(Type type, Reduction reduction);

}  // namespace pccl
