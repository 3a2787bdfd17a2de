// Programs without a schedule: every message goes straight from who has it to who wants it, and may have any length.
#pragma once

#include <cstdint>
#include <memory>

#include "program.hpp"

namespace pccl {

using ProgramPointer = std::shared_ptr<const Program>;

// In all of these a rank is done when it has heard that all messages were as long as who got them expected, so that all ranks
// are told where one was not.

// Slot i of the input goes to rank i, and what comes from rank i into slot i of the output.
ProgramPointer all_to_all(int32_t size, int32_t rank);
// The root has a slot of output for each rank; the only slot of input is what a rank gives.
ProgramPointer gather(int32_t size, int32_t rank, int32_t root);
// The root has a slot of input for each rank; the only slot of output is what a rank gets.
ProgramPointer scatter(int32_t size, int32_t rank, int32_t root);
// Each rank's only slot of input goes to slot `rank` of everyone's output.
ProgramPointer all_gather_parts(int32_t size, int32_t rank);
// Slot i of the input goes to rank i, which adds up what it gets, in the order of ranks after its own, in its only slot of output.
ProgramPointer reduce_scatter_parts(int32_t size, int32_t rank);
// Every rank tells rank 0 that it is there, which then tells all.
ProgramPointer roll_call(int32_t size, int32_t rank);
// One message to or from `peer`, a rank of the group or -1 for any, of the only slot.
ProgramPointer point(int32_t size, int32_t rank, Kind kind, int32_t peer, uint32_t tag);

}  // namespace pccl
