// What Python hands over (kvquant/kernels/native.py mirrors these structures field by field).
#pragma once
#include <stdint.h>

#define KVQ_VERSION 4

enum { KVQ_CODES = 0, KVQ_FLOAT32 = 1, KVQ_BFLOAT16 = 2, KVQ_FLOAT16 = 3 };

// How keys, or values, are stored. Codes as kvquant/codecs/packing.py lays them out.
typedef struct {
    int64_t kind;
    int64_t bits;       // of a code: 8, 6, 5, 4, 3 or 2
    int64_t per_token;  // 1: a scale for `group` channels of a token; 0: for `group` tokens of a channel
    int64_t group;
    int64_t dim;
    int64_t rotated;    // 1: of values, undone in the output (keys: the query is rotated before)
} KvqFormat;

// Keys, or values, of a segment. Strides in bytes; within a block scale and zero lie densely, [heads, …].
typedef struct {
    const char* data;
    int64_t block_stride, head_stride, token_stride;
    const char* scale;
    const char* zero;
    int64_t scale_stride, zero_stride;  // from block to block
    int64_t wide;  // 1: scale and zero are float32, else float16
} KvqSide;

// Blocks of `tokens` tokens each, of which those numbered first ≤ t < stop count.
typedef struct {
    const KvqFormat* key_format;
    const KvqFormat* value_format;
    KvqSide key, value;
    const float* extra;  // added to q·k, [blocks, heads, queries, tokens]; or NULL
    int64_t blocks, tokens, first, stop;
    int64_t causal;  // 1: of the last `news` tokens, a query sees those up to its own
} KvqSegment;

typedef struct {
    int64_t heads, queries, news;  // query m of a head is that of new token m % news
    int64_t key_dim, value_dim;
    float scale;    // of q·k
    float softcap;  // 0: none
} KvqShape;
