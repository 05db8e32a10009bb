// Planes of codes, as kvquant/codecs/packing.py cuts them: where the bits of a code are no power of two, the lower ones
// are packed, and after them the others.
#pragma once
#include <stdint.h>

static inline int64_t low_bits(int64_t bits) { return bits & 8 ? 8 : bits & 4 ? 4 : bits & 2 ? 2 : 1; }

static inline int64_t high_bits(int64_t bits) { return bits - low_bits(bits); }  // 0: there is one plane
