// GroupNorm followed by an activation, on the CPU.
#pragma once

#include "../group_norm.h"

namespace fxfuse::cpu {

// Both run on torch's own threads, and give the same bits whatever their number.  `output_dtype`
// must be `dtype`.  Scratch memory comes from operator new; nothing else can throw.
void forward(const Forward& problem);
void backward(const Backward& problem);

}  // namespace fxfuse::cpu
