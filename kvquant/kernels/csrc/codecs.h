// What Python hands over to encode and to decode (kvquant/kernels/native_codecs.py mirrors these structures).
#pragma once
#include "kvq.h"

// Tokens as they are, [blocks, heads, tokens, dim], the channels of a token side by side. Strides in bytes.
typedef struct {
    char* data;
    int64_t kind;  // KVQ_FLOAT32, KVQ_BFLOAT16 or KVQ_FLOAT16
    int64_t block_stride, head_stride, token_stride;
    int64_t blocks, heads, tokens;
} KvqStates;

// The same as codes; within a block each field lies densely. Strides, from block to block, in bytes.
typedef struct {
    uint8_t* codes;
    char* scale;
    char* zero;
    int64_t codes_stride, scale_stride, zero_stride;
    int64_t wide;  // 1: scale and zero are float32, else float16
} KvqFields;

// What encoding found a block to be.
enum { KVQ_NARROW = 0, KVQ_WIDE = 1, KVQ_UNFIT = 2 };
