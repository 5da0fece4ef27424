/* One pass of AdamW over flat arrays: gradient in, moments and fp32 master updated, working copy out.

   Touches each byte once: with a bf16 gradient and working copy, 28 bytes of memory traffic per parameter (gradient 2, master
   and both moments 12 read and 12 written, working copy 2). Owns no memory and knows no stages: adamw.py calls it.

   The arithmetic and its order are those of torch.optim.AdamW(fused=True). Compiled without value-changing options, so a
   NaN or an infinity stays one, and with -ffp-contract=off, so every CPU gives the same bits. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float gradient_factor; /* unscaling and clipping */
    float decay;           /* 1 - learning rate * weight decay */
    float beta1, beta2;
    float one_minus_beta1, one_minus_beta2;
    float step_size;      /* learning rate / (1 - beta1^step) */
    float root_correction; /* sqrt(1 - beta2^step) */
    float epsilon;
} Constants;

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Round to nearest, ties to even; a NaN stays a NaN where rounding its bits up would make it an infinity. */
static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)0x7fc0u : (uint16_t)rounded;
}

static inline float update(float gradient, float *master, float *exp_avg, float *exp_avg_sq, const Constants *c) {
    float scaled = gradient * c->gradient_factor;
    float mean = *exp_avg + (scaled - *exp_avg) * c->one_minus_beta1;
    float square = *exp_avg_sq * c->beta2 + c->one_minus_beta2 * scaled * scaled;
    float value = *master * c->decay - c->step_size * mean / (sqrtf(square) / c->root_correction + c->epsilon);
    *exp_avg = mean;
    *exp_avg_sq = square;
    *master = value;
    return value;
}

/* All arrays have `count` elements; `threads` OpenMP threads share them in equal runs. */
void mobius_adamw_fp32(int64_t count, float *restrict master, float *restrict exp_avg, float *restrict exp_avg_sq,
                       const float *restrict gradient, const Constants *constants, int threads) {
    const Constants c = *constants;
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (int64_t i = 0; i < count; ++i)
        update(gradient[i], &master[i], &exp_avg[i], &exp_avg_sq[i], &c);
}

void mobius_adamw_bf16(int64_t count, float *restrict master, float *restrict exp_avg, float *restrict exp_avg_sq,
                       const uint16_t *restrict gradient, uint16_t *restrict weight, const Constants *constants,
                       int threads) {
    const Constants c = *constants;
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (int64_t i = 0; i < count; ++i)
        weight[i] = to_bf16(update(from_bf16(gradient[i]), &master[i], &exp_avg[i], &exp_avg_sq[i], &c));
}
