// Decode attention that reads codes where they lie, and the codecs' encoding and decoding.
//
// One file, plain C at its border, no torch inside. `body.inc` is compiled once for every instruction set, and the
// best one the machine has is chosen when the library is loaded.
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "kvq.h"
#include "planes.h"

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KVQ_X86 1
#include <immintrin.h>
#else
#define KVQ_X86 0
#endif

namespace portable {
#define KVQ_ISA 0
#include "body.inc"
#undef KVQ_ISA
}  // namespace portable

#if KVQ_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define KVQ_ISA 1
#include "body.inc"
#undef KVQ_ISA
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
namespace avx512 {
#define KVQ_ISA 2
#include "body.inc"
#undef KVQ_ISA
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")
namespace vnni {
#define KVQ_ISA 3
#include "body.inc"
#undef KVQ_ISA
}  // namespace vnni
#pragma GCC pop_options
#endif

extern "C" {
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

int64_t kvq_version(void) { return KVQ_VERSION; }

// The best instruction set here: 0 portable, 1 AVX2, 2 AVX-512BW, 3 AVX-512-VNNI.
int64_t kvq_best(void) {
#if KVQ_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return 1;
    return __builtin_cpu_supports("avx512vnni") ? 3 : 2;
#else
    return 0;
#endif
}

// Attention of `rows` rows of `query` [rows, heads, queries, key_dim], row r over counts[r] of the segments, which come
// row by row: `output` [rows, heads, queries, value_dim] and the log of the sum of exponentials, `lse` [rows, heads,
// queries]. 0, or 1 if there is no memory.
int64_t kvq_attention(const KvqShape* shape, const KvqSegment* segments, const int64_t* counts, int64_t rows,
                      const float* query, float* output, float* lse, int64_t threads, int64_t isa) {
#if KVQ_X86
    if (isa == 3) return vnni::attention(*shape, segments, counts, rows, query, output, lse, threads);
    if (isa == 2) return avx512::attention(*shape, segments, counts, rows, query, output, lse, threads);
    if (isa == 1) return avx2::attention(*shape, segments, counts, rows, query, output, lse, threads);
#endif
    return portable::attention(*shape, segments, counts, rows, query, output, lse, threads);
}
}
