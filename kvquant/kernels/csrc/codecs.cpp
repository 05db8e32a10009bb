// The affine codec (kvquant/codecs/affine.py), encoding and decoding, bit for bit.
//
// The same float32 operations in the same order, and none of them contracted: content keys stand for codes, whoever
// made them. `vector.inc` and what follows it are compiled once for every instruction set.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#else
#error "how this compiler is told not to contract is not known"
#endif
#if defined(__FAST_MATH__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "codes would not be those of the other machines"
#endif

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codecs.h"
#include "planes.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KVQ_X86 1
#include <immintrin.h>
#else
#define KVQ_X86 0
#endif

namespace {  // one name may mean two things in two files
namespace portable {
#define KVQ_ISA 0
#include "vector.inc"
#include "tiles.inc"
#include "packing.inc"
#include "ranges.inc"
#include "encode.inc"
#include "decode.inc"
#undef KVQ_ISA
}  // namespace portable

#if KVQ_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define KVQ_ISA 1
#include "vector.inc"
#include "tiles.inc"
#include "packing.inc"
#include "ranges.inc"
#include "encode.inc"
#include "decode.inc"
#undef KVQ_ISA
}  // namespace avx2
#pragma GCC pop_options

// VNNI multiplies integers, of which there are none here.
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
namespace avx512 {
#define KVQ_ISA 2
#include "vector.inc"
#include "tiles.inc"
#include "packing.inc"
#include "ranges.inc"
#include "encode.inc"
#include "decode.inc"
#undef KVQ_ISA
}  // namespace avx512
#pragma GCC pop_options
#endif
}  // namespace

extern "C" {
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

// Encodes states into `fields`. `seen` [blocks] says of each block what it was found to be: of one that is not
// KVQ_NARROW the fields are not good. If `fields->wide`, blocks that are KVQ_WIDE there already are encoded, and no
// others. 0, or 1 if there is no memory.
int64_t kvq_encode(const KvqFormat* format, const KvqStates* states, const KvqFields* fields, uint8_t* seen,
                   int64_t threads, int64_t isa) {
#if KVQ_X86
    if (isa >= 2) return avx512::encode(*format, *states, *fields, seen, threads);
    if (isa == 1) return avx2::encode(*format, *states, *fields, seen, threads);
#endif
    return portable::encode(*format, *states, *fields, seen, threads);
}

// Decodes `fields` into states. 0, or 1 if there is no memory.
int64_t kvq_decode(const KvqFormat* format, const KvqFields* fields, const KvqStates* states, int64_t threads,
                   int64_t isa) {
#if KVQ_X86
    if (isa >= 2) return avx512::decode(*format, *fields, *states, threads);
    if (isa == 1) return avx2::decode(*format, *fields, *states, threads);
#endif
    return portable::decode(*format, *fields, *states, threads);
}
}
