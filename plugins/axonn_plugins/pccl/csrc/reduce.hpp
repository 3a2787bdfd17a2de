// Elementwise combination of two buffers.
#pragma once

#include <cstddef>

#include "frame.hpp"

namespace pccl {

// to[i] = mine[i] (+) theirs[i]; `to` may be `mine`. No pointer need be aligned.
void combine(Type type, Reduction reduction, void* to, const void* mine, const void* theirs, size_t elements);

// data[i] /= divisor; whole numbers are cut towards zero, as NCCL's averages are.
void divide(Type type, void* data, size_t elements, int divisor);

bool can_reduce(Type type, Reduction reduction);

}  // namespace pccl
