/* One pass of AdamW over flat arrays: gradient in, moments and master updated; the working copy is part of the master.

   With bf16 weights the master is split: its bits are (bits of the weight << 16) + a 16-bit remainder, as described in
   engine/split_master.py. Each byte is touched once and none is only written: with bf16 gradients 26 bytes of memory
   traffic per parameter (gradient 2; weight and remainder 4 and both moments 8, read and written). Owns no memory and
   knows no stages: adamw.py calls it.

   The arithmetic and its order are those of torch.optim.AdamW(fused=True). Compiled without value-changing options, so
   a NaN or an infinity stays one, and with -ffp-contract=off, so every CPU gives the same bits. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Elements per block. Threads take blocks dynamically: they share cores with the main thread and other ranks, and with
   a static split all would wait for a thread that lost its core. */
#define BLOCK 32768

/* Elements between two prefetches, and how far ahead of their use these are (docs/decisions/0004-cpu-adamw.md). */
#define RUN 64
#define AHEAD 512
#define CACHE_LINE 64

typedef struct {
    float gradient_factor; /* unscaling and clipping */
    float decay;           /* 1 - learning rate * weight decay */
    float beta2;
    float one_minus_beta1, one_minus_beta2;
    float step_size;       /* learning rate / (1 - beta1^step) */
    float root_correction; /* sqrt(1 - beta2^step) */
    float epsilon;
} Constants;

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bf16(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

static inline float join(uint16_t weight, int16_t remainder) {
    return from_bits(((uint32_t)weight << 16) + (uint32_t)(int32_t)remainder);
}

/* Round to nearest, ties to even, and store the remainder; 32768 (a tie rounded towards zero) becomes 32767. A NaN
   stays a NaN, although rounding its bits up could make it an infinity or a zero. */
static inline void split(float value, uint16_t *weight, int16_t *remainder) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    int32_t rest = (int32_t)(bits - (rounded << 16));
    int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    *weight = is_nan ? (uint16_t)0x7fc0u : (uint16_t)rounded;
    *remainder = is_nan ? (int16_t)0 : (int16_t)(rest > 32767 ? 32767 : rest);
}

/* Return the new master; update the moments in place. */
static inline float update(float gradient, float master, float *exp_avg, float *exp_avg_sq, const Constants *c) {
    float scaled = gradient * c->gradient_factor;
    float mean = *exp_avg + (scaled - *exp_avg) * c->one_minus_beta1;
    float square = *exp_avg_sq * c->beta2 + c->one_minus_beta2 * scaled * scaled;
    *exp_avg = mean;
    *exp_avg_sq = square;
    return master * c->decay - c->step_size * mean / (sqrtf(square) / c->root_correction + c->epsilon);
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Prefetch RUN elements of `size` bytes, AHEAD elements after `start`; past the end this has no effect. */
static inline void request(const void *array, int64_t start, size_t size) {
    uintptr_t address = (uintptr_t)array + (uintptr_t)(start + AHEAD) * size;
    for (size_t offset = 0; offset < RUN * size; offset += CACHE_LINE)
        __builtin_prefetch((const void *)(address + offset));
}

/* All arrays have `count` elements; `threads` OpenMP threads share them. */
void mobius_adamw_fp32(int64_t count, float *restrict master, float *restrict exp_avg, float *restrict exp_avg_sq,
                       const float *restrict gradient, const Constants *constants, int threads) {
    const Constants c = *constants;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t block = 0; block < count; block += BLOCK)
        for (int64_t start = block; start < smaller(block + BLOCK, count); start += RUN) {
            const int64_t end = smaller(start + RUN, count);
            request(master, start, sizeof *master);
            request(exp_avg, start, sizeof *exp_avg);
            request(exp_avg_sq, start, sizeof *exp_avg_sq);
            request(gradient, start, sizeof *gradient);
#pragma omp simd
            for (int64_t i = start; i < end; ++i)
                master[i] = update(gradient[i], master[i], &exp_avg[i], &exp_avg_sq[i], &c);
        }
}

/* The same with a split master, by the type of the gradient and how it becomes a float. */
#define SPLIT_KERNEL(NAME, GRADIENT, WIDEN)                                                                              \
    void NAME(int64_t count, uint16_t *restrict weight, int16_t *restrict remainder, float *restrict exp_avg,            \
              float *restrict exp_avg_sq, const GRADIENT *restrict gradient, const Constants *constants, int threads) {  \
        const Constants c = *constants;                                                                                  \
        _Pragma("omp parallel for schedule(dynamic) num_threads(threads)")                                               \
        for (int64_t block = 0; block < count; block += BLOCK)                                                           \
            for (int64_t start = block; start < smaller(block + BLOCK, count); start += RUN) {                           \
                const int64_t end = smaller(start + RUN, count);                                                         \
                request(weight, start, sizeof *weight);                                                                  \
                request(remainder, start, sizeof *remainder);                                                            \
                request(exp_avg, start, sizeof *exp_avg);                                                                \
                request(exp_avg_sq, start, sizeof *exp_avg_sq);                                                          \
                request(gradient, start, sizeof *gradient);                                                              \
                _Pragma("omp simd")                                                                                      \
                for (int64_t i = start; i < end; ++i)                                                                    \
                    split(update(WIDEN(gradient[i]), join(weight[i], remainder[i]), &exp_avg[i], &exp_avg_sq[i], &c),    \
                          &weight[i], &remainder[i]);                                                                    \
            }                                                                                                            \
    }

SPLIT_KERNEL(mobius_adamw_split_bf16, uint16_t, from_bf16)
SPLIT_KERNEL(mobius_adamw_split_fp32, float, /* as it is */)
