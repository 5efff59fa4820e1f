/* Products of one row with a matrix, on CPUs: out = weight [out, in] @ row, for weights in bf16 and in groups of codes.

A decode of one request reads each weight once, so its time is that of reading memory. Sums are those of 16 places side
by side, each a vector, and are added up at the end. A result does not depend on the number of threads. Formats are
those of weight_formats.py: 16 divides the sizes of groups, and of half blocks.
*/
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

static inline Floats floats_at(const float *from) {
    Floats found;
    memcpy(&found, from, sizeof found);
    return found;
}

/* Ask for memory that is read soon. Past the end of a weight, nothing happens. */
static inline void fetch_ahead(const void *from) { __builtin_prefetch((const char *)from + 2048); }

/* A loop, because compilers widen bytes by one instruction here and by many in __builtin_convertvector. */
static inline Integers bytes_at(const uint8_t *from) {
    int32_t wide[16];
    for (int i = 0; i < 16; i++) wide[i] = from[i];
    Integers found;
    memcpy(&found, wide, sizeof found);
    return found;
}

/* bf16 is the upper half of a float. */
static inline Floats bf16_at(const uint16_t *from) {
    Halves found;
    memcpy(&found, from, sizeof found);
    Integers bits = __builtin_convertvector(found, Integers) << 16;
    return (Floats)bits;
}

static inline float sum_of(Floats values) {
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += values[i];
    return sum;
}

/* fp16 that is finite. */
static inline float of_half(uint32_t half) {
    uint32_t bits = (half & 0x8000u) << 16 | (half & 0x7fffu) << 13;
    float value;
    memcpy(&value, &bits, 4);
    return value * 0x1p112f;
}

static float bf16_output(const uint16_t *codes, const float *row, long num_in) {
    Floats one = {0}, two = {0}, three = {0}, four = {0};
    long i = 0;
    for (; i + 64 <= num_in; i += 64) {
        fetch_ahead(codes + i), fetch_ahead(codes + i + 32);
        one += bf16_at(codes + i) * floats_at(row + i);
        two += bf16_at(codes + i + 16) * floats_at(row + i + 16);
        three += bf16_at(codes + i + 32) * floats_at(row + i + 32);
        four += bf16_at(codes + i + 48) * floats_at(row + i + 48);
    }
    for (; i + 16 <= num_in; i += 16) one += bf16_at(codes + i) * floats_at(row + i);
    float sum = sum_of((one + two) + (three + four));
    for (; i < num_in; i++) {
        uint32_t bits = (uint32_t)codes[i] << 16;
        float value;
        memcpy(&value, &bits, 4);
        sum += value * row[i];
    }
    return sum;
}

void weft_bf16_product(const uint16_t *weight, const float *row, float *out, long num_out, long num_in, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long o = 0; o < num_out; o++) out[o] = bf16_output(weight + o * num_in, row, num_in);
}

/* Codes of 8 bits. `sums` are those of the row's groups. */
static float int8_output(
    const uint8_t *codes, const uint32_t *ranges, const float *row, const float *sums, long num_groups, long group) {
    Floats total = {0};
    float least = 0;
    for (long g = 0; g < num_groups; g++, codes += group, row += group) {
        Floats sum = {0};
        fetch_ahead(codes), fetch_ahead(codes + 64);
        for (long i = 0; i < group; i += 16) sum += __builtin_convertvector(bytes_at(codes + i), Floats) * floats_at(row + i);
        total += sum * of_half(ranges[g] & 0xffffu);
        least += sums[g] * of_half(ranges[g] >> 16);
    }
    return sum_of(total) + least;
}

void weft_int8_product(
    const uint8_t *codes, const uint32_t *ranges, const float *row, const float *sums, float *out, long num_out,
    long num_in, long group, int threads) {
    long num_groups = num_in / group;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long o = 0; o < num_out; o++)
        out[o] = int8_output(codes + o * num_in, ranges + o * num_groups, row, sums, num_groups, group);
}

/* Codes of 4 bits. A block of inputs has its first half in the low halves of its bytes, and is one group or two. `sums`
are those of half blocks. */
static float int4_output(
    const uint8_t *codes, const uint32_t *ranges, const float *row, const float *sums, long num_blocks, long half,
    int groups) {
    Floats total = {0};
    float least = 0;
    for (long b = 0; b < num_blocks; b++, codes += half, row += 2 * half, ranges += groups) {
        Floats low = {0}, high = {0};
        fetch_ahead(codes);
        for (long i = 0; i < half; i += 16) {
            Integers bytes = bytes_at(codes + i);
            low += __builtin_convertvector(bytes & 15, Floats) * floats_at(row + i);
            high += __builtin_convertvector(bytes >> 4, Floats) * floats_at(row + half + i);
        }
        uint32_t first = ranges[0], last = ranges[groups - 1];
        total += low * of_half(first & 0xffffu) + high * of_half(last & 0xffffu);
        least += sums[2 * b] * of_half(first >> 16) + sums[2 * b + 1] * of_half(last >> 16);
    }
    return sum_of(total) + least;
}

void weft_int4_product(
    const uint8_t *codes, const uint32_t *ranges, const float *row, const float *sums, float *out, long num_out,
    long num_in, long block, int groups, int threads) {
    long num_blocks = num_in / block, row_bytes = num_in / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long o = 0; o < num_out; o++) {
        const uint32_t *range = ranges + o * num_blocks * groups;
        out[o] = int4_output(codes + o * row_bytes, range, row, sums, num_blocks, block / 2, groups);
    }
}

/* Attention of one query over some tokens, in three passes: scores, weights, values. Keys and values of a token lie at
`slots` [tokens]. `scores` is room for the tokens. 16 divides head_dim. */
static void attention_of_head(
    const float *query, const uint16_t *keys, const uint16_t *values, const int32_t *slots, float *scores, float *out,
    long num_tokens, long stride, long head_dim, float scale) {
    float highest = -3.4e38f, total = 0;
    for (long t = 0; t < num_tokens; t++) {
        const uint16_t *key = keys + slots[t] * stride;
        Floats sum = {0};
        for (long i = 0; i < head_dim; i += 16) sum += bf16_at(key + i) * floats_at(query + i);
        scores[t] = sum_of(sum) * scale;
        if (scores[t] > highest) highest = scores[t];
    }
    for (long t = 0; t < num_tokens; t++) total += scores[t] = expf(scores[t] - highest);
    for (long i = 0; i < head_dim; i += 16) {
        Floats mixed = {0};
        for (long t = 0; t < num_tokens; t++) mixed += bf16_at(values + slots[t] * stride + i) * scores[t];
        mixed /= total;
        memcpy(out + i, &mixed, sizeof mixed);
    }
}

void weft_bf16_attention(
    const float *query, const uint16_t *keys, const uint16_t *values, const int32_t *slots, float *scores, float *out,
    long num_tokens, long num_heads, long num_key_heads, long head_dim, float scale, int threads) {
    long group = num_heads / num_key_heads, stride = num_key_heads * head_dim;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long head = 0; head < num_heads; head++) {
        long first = head / group * head_dim, own = head * head_dim;
        float *room = scores + head * num_tokens;
        attention_of_head(
            query + own, keys + first, values + first, slots, room, out + own, num_tokens, stride, head_dim, scale);
    }
}
