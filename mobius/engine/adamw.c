/* One pass of AdamW over flat arrays: gradient in, moments and master updated; the working copy is part of the master.

   With bf16 weights the master is split: its bits are (bits of the weight << 16) + a 16-bit remainder, as described in
   engine/split_master.py. Each byte is touched once and none is only written: with bf16 gradients 26 bytes of memory
   traffic per parameter (gradient 2; weight and remainder 4 and both moments 8, read and written). Owns no memory and
   knows no stages: adamw.py calls it.

   With fewer bytes of state (engine/reduced_states.py has the formats) 18 bytes are moved with bf16 moments, 12.1 with
   8-bit moments and a master of 24 bits.

   The arithmetic and its order are those of torch.optim.AdamW(fused=True). Compiled without value-changing options, so
   a NaN or an infinity stays one, and with -ffp-contract=off, so every CPU gives the same bits. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Elements per block. Threads take blocks dynamically: they share cores with the main thread and other ranks, and with
   a static split all would wait for a thread that lost its core. */
#define BLOCK 32768

/* Elements between two prefetches, and how far ahead of their use these are (docs/decisions/0004-cpu-adamw.md). Numbers
   of 16 and 8 bits are widened into arrays of so many floats, and narrowed from them, in loops of their own: one loop
   over several widths took 1.6 times as long. */
#define RUN 64
#define AHEAD 512
#define CACHE_LINE 64

typedef struct {
    float gradient_factor; /* unscaling and clipping */
    float decay;           /* 1 - learning rate * weight decay */
    float beta2;
    float one_minus_beta1, one_minus_beta2;
    float step_size;       /* learning rate / (1 - beta1^step) */
    float root_correction; /* sqrt(1 - beta2^step); 1 with states in a reduced format */
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

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Round to nearest, ties to even, and store the remainder; 32768 (a tie rounded towards zero) becomes 32767. A NaN
   stays a NaN, although rounding its bits up could make it an infinity or a zero. */
static inline void split(float value, int32_t *weight, int32_t *remainder) {
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    int32_t rest = (int32_t)(bits - (rounded << 16));
    int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    *weight = is_nan ? 0x7fc0 : (int32_t)rounded;
    *remainder = is_nan ? 0 : rest > 32767 ? 32767 : rest;
}

/* Return the new master; update the moments in place. With states in a reduced format the root's correction is part of
   the other constants, which saves a division: they have no other AdamW's bits to keep. */
static inline float update(float gradient, float master, float *exp_avg, float *exp_avg_sq, const Constants *c,
                           int is_reduced) {
    float scaled = gradient * c->gradient_factor;
    float mean = *exp_avg + (scaled - *exp_avg) * c->one_minus_beta1;
    float square = *exp_avg_sq * c->beta2 + c->one_minus_beta2 * scaled * scaled;
    *exp_avg = mean;
    *exp_avg_sq = square;
    float root = is_reduced ? sqrtf(square) : sqrtf(square) / c->root_correction;
    return master * c->decay - c->step_size * mean / (root + c->epsilon);
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Prefetch RUN elements of `size` bytes, AHEAD elements after `start`; past the end this has no effect. */
static inline void request(const void *array, int64_t start, size_t size) {
    uintptr_t address = (uintptr_t)array + (uintptr_t)(start + AHEAD) * size;
    for (size_t offset = 0; offset < RUN * size; offset += CACHE_LINE)
        __builtin_prefetch((const void *)(address + offset));
}

/* UPDATE(start, length, ...) for LENGTH elements at a time, in blocks that `threads` OpenMP threads share. The
   length is a constant and UPDATE is inlined, so that its loops are unrolled. UPDATE_REST: for each element behind
   whole runs. UPDATE_LAST_GROUP: for a group behind them, half a run. */
#define UPDATE_RUNS(LENGTH, UPDATE, ...)                                                                              \
    _Pragma("omp parallel for schedule(dynamic) num_threads(threads)")                                                \
    for (int64_t block = 0; block < count; block += BLOCK)                                                            \
        for (int64_t start = block; start + LENGTH <= smaller(block + BLOCK, count); start += LENGTH)                 \
            UPDATE(start, LENGTH, __VA_ARGS__);
#define UPDATE_REST(UPDATE, ...)                                                                                      \
    for (int64_t start = count / RUN * RUN; start < count; ++start)                                                   \
        UPDATE(start, 1, __VA_ARGS__);
#define UPDATE_LAST_GROUP(UPDATE, ...)                                                                                \
    if (count % RUN)                                                                                                  \
        UPDATE(count / RUN * RUN, GROUP, __VA_ARGS__);
#define INLINE static inline __attribute__((always_inline))
#define EACH for (int64_t i = 0; i < length; ++i)

INLINE void update_whole(int64_t start, int64_t length, float *restrict master, float *restrict exp_avg,
                         float *restrict exp_avg_sq, const float *restrict gradient, const Constants *c) {
    request(master, start, sizeof *master);
    request(exp_avg, start, sizeof *exp_avg);
    request(exp_avg_sq, start, sizeof *exp_avg_sq);
    request(gradient, start, sizeof *gradient);
    master += start, exp_avg += start, exp_avg_sq += start, gradient += start;
    EACH master[i] = update(gradient[i], master[i], &exp_avg[i], &exp_avg_sq[i], c, 0);
}

/* All arrays of a kernel have `count` elements. */
void mobius_adamw_fp32(int64_t count, float *master, float *exp_avg, float *exp_avg_sq, const float *gradient,
                       const Constants *constants, int threads) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_whole, master, exp_avg, exp_avg_sq, gradient, &c)
    UPDATE_REST(update_whole, master, exp_avg, exp_avg_sq, gradient, &c)
}

/* The gradients from `start` on as floats; `is_whole` says whether they are that or bf16. */
INLINE void load_gradients(int64_t start, int64_t length, const void *gradient, int is_whole, float *restrict loaded) {
    const float *whole = (const float *)gradient + start;
    const uint16_t *half = (const uint16_t *)gradient + start;
    request(gradient, start, is_whole ? sizeof *whole : sizeof *half);
    if (is_whole)
        EACH loaded[i] = whole[i];
    else
        EACH loaded[i] = from_bf16(half[i]);
}

INLINE void load_master(int64_t start, int64_t length, const uint16_t *weight, const int16_t *remainder,
                        float *restrict loaded) {
    request(weight, start, sizeof *weight);
    request(remainder, start, sizeof *remainder);
    weight += start, remainder += start;
    EACH loaded[i] = join(weight[i], remainder[i]);
}

INLINE void store_master(int64_t start, int64_t length, uint16_t *restrict weight, int16_t *restrict remainder,
                         const float *restrict master) {
    int32_t weights[RUN], remainders[RUN];
    weight += start, remainder += start;
    EACH split(master[i], &weights[i], &remainders[i]);
    EACH weight[i] = (uint16_t)weights[i];
    EACH remainder[i] = (int16_t)remainders[i];
}

INLINE void update_split(int64_t start, int64_t length, uint16_t *restrict weight, int16_t *restrict remainder,
                         float *restrict exp_avg, float *restrict exp_avg_sq, const void *restrict gradient,
                         int is_whole, const Constants *c) {
    float master[RUN], gradients[RUN];
    load_gradients(start, length, gradient, is_whole, gradients);
    load_master(start, length, weight, remainder, master);
    request(exp_avg, start, sizeof *exp_avg);
    request(exp_avg_sq, start, sizeof *exp_avg_sq);
    exp_avg += start, exp_avg_sq += start;
    EACH master[i] = update(gradients[i], master[i], &exp_avg[i], &exp_avg_sq[i], c, 0);
    store_master(start, length, weight, remainder, master);
}

/* With a split master; the name ends with the type of the gradient, here and below. */
void mobius_adamw_split_bf16(int64_t count, uint16_t *weight, int16_t *remainder, float *exp_avg, float *exp_avg_sq,
                             const uint16_t *gradient, const Constants *constants, int threads) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_split, weight, remainder, exp_avg, exp_avg_sq, gradient, 0, &c)
    UPDATE_REST(update_split, weight, remainder, exp_avg, exp_avg_sq, gradient, 0, &c)
}

void mobius_adamw_split_fp32(int64_t count, uint16_t *weight, int16_t *remainder, float *exp_avg, float *exp_avg_sq,
                             const float *gradient, const Constants *constants, int threads) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_split, weight, remainder, exp_avg, exp_avg_sq, gradient, 1, &c)
    UPDATE_REST(update_split, weight, remainder, exp_avg, exp_avg_sq, gradient, 1, &c)
}

/* Fewer bytes of state. Stochastic rounding takes a word of noise for each element: a hash of its index within its
   parameter (lowbias32, by Chris Wellons) and a key, so that neither threads nor the cut into stages change a bit. */
static inline uint32_t noise_of(uint32_t key, uint32_t index) {
    uint32_t x = index ^ key;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

static inline int is_finite(uint32_t bits) { return (bits & 0x7f800000u) != 0x7f800000u; }

/* bf16 moments: the first to nearest, the second stochastically. To nearest it would never decay: a thousandth of it is
   less than half of its last bit. */
INLINE void update_bf16_states(int64_t start, int64_t length, uint16_t *restrict weight, int16_t *restrict remainder,
                               uint16_t *restrict exp_avg, uint16_t *restrict exp_avg_sq, const void *restrict gradient,
                               int is_whole, const Constants *c, uint32_t key, uint32_t first) {
    float master[RUN], gradients[RUN], means[RUN], squares[RUN];
    int32_t rounded[RUN], remainders[RUN];
    load_gradients(start, length, gradient, is_whole, gradients);
    load_master(start, length, weight, remainder, master);
    request(exp_avg, start, sizeof *exp_avg);
    request(exp_avg_sq, start, sizeof *exp_avg_sq);
    exp_avg += start, exp_avg_sq += start, first += (uint32_t)start;
    EACH means[i] = from_bf16(exp_avg[i]);
    EACH squares[i] = from_bf16(exp_avg_sq[i]);
    EACH master[i] = update(gradients[i], master[i], &means[i], &squares[i], c, 1);
    store_master(start, length, weight, remainder, master);
    EACH split(means[i], &rounded[i], &remainders[i]);
    EACH exp_avg[i] = (uint16_t)rounded[i];
    EACH {
        uint32_t bits = to_bits(squares[i]), noise = noise_of(key, first + (uint32_t)i);
        rounded[i] = (int32_t)((bits + (is_finite(bits) ? noise >> 16 : 0u)) >> 16);
    }
    EACH exp_avg_sq[i] = (uint16_t)rounded[i];
}

void mobius_adamw_bf16_states_bf16(int64_t count, uint16_t *weight, int16_t *remainder, uint16_t *exp_avg,
                                   uint16_t *exp_avg_sq, const uint16_t *gradient, const Constants *constants,
                                   int threads, uint32_t key, uint32_t first) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_bf16_states, weight, remainder, exp_avg, exp_avg_sq, gradient, 0, &c, key, first)
    UPDATE_REST(update_bf16_states, weight, remainder, exp_avg, exp_avg_sq, gradient, 0, &c, key, first)
}

void mobius_adamw_bf16_states_fp32(int64_t count, uint16_t *weight, int16_t *remainder, uint16_t *exp_avg,
                                   uint16_t *exp_avg_sq, const float *gradient, const Constants *constants,
                                   int threads, uint32_t key, uint32_t first) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_bf16_states, weight, remainder, exp_avg, exp_avg_sq, gradient, 1, &c, key, first)
    UPDATE_REST(update_bf16_states, weight, remainder, exp_avg, exp_avg_sq, gradient, 1, &c, key, first)
}

/* 8-bit moments relative to a power of two for each group, and a master of 24 bits. */
#define GROUP 32
#define CODE_SHIFT 20 /* an fp32 word without the last 20 bits of its mantissa: three bits are left */
#define EXP_AVG_RANGE 15
#define EXP_AVG_SQ_RANGE 31

static inline int32_t between(int32_t value, int32_t least, int32_t most) {
    return value < least ? least : value > most ? most : value;
}

/* The word that code 0 would stand for in a group with this exponent. */
static inline int32_t lowest_word(int32_t exponent, int32_t range) { return (exponent - range) * (1 << 23); }

static inline int32_t group_exponent(uint32_t largest, int32_t range) {
    return between((int32_t)(largest >> 23) + 1, range + 1, 254);
}

static inline float decode_exp_avg(uint8_t code, int32_t lowest) {
    uint32_t magnitude = code & 0x7fu;
    uint32_t bits = magnitude ? (magnitude << CODE_SHIFT) + (uint32_t)lowest : 0u;
    return from_bits(bits | (uint32_t)(code & 0x80u) << 24);
}

static inline int32_t encode_exp_avg(uint32_t bits, int32_t lowest) {
    int32_t magnitude = (int32_t)(bits & 0x7fffffffu);
    int32_t code = between((magnitude - lowest + (1 << (CODE_SHIFT - 1))) >> CODE_SHIFT, 0, 127);
    return code | (int32_t)(bits >> 24 & 0x80u);
}

static inline float decode_exp_avg_sq(uint8_t code, int32_t lowest) {
    return from_bits(code ? ((uint32_t)code << CODE_SHIFT) + (uint32_t)lowest : 0u);
}

/* Only zero has code 0: the second moment of an element whose first one is not zero must not vanish. */
static inline int32_t encode_exp_avg_sq(uint32_t bits, int32_t lowest, uint32_t noise) {
    int32_t code = between(((int32_t)bits - lowest + (int32_t)(noise >> (32 - CODE_SHIFT))) >> CODE_SHIFT, 1, 255);
    return bits ? code : 0;
}

static inline float join24(uint16_t weight, int8_t remainder) {
    return from_bits((((uint32_t)weight << 8) + (uint32_t)(int32_t)remainder) << 8);
}

/* Round stochastically to 24 bits; the weight is that rounded to nearest, ties away from zero, so that the remainder
   fits 8 bits. */
static inline void split24(float value, uint32_t noise, int32_t *weight, int32_t *remainder) {
    uint32_t bits = to_bits(value);
    uint32_t word = (bits + (noise & 0xffu)) >> 8; /* an infinity's last bits are zeros: it stays one */
    uint32_t rounded = (word + 0x80u) >> 8;
    int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    *weight = is_nan ? 0x7fc0 : (int32_t)rounded;
    *remainder = is_nan ? 0 : (int32_t)(word - (rounded << 8));
}

/* Update whole groups, whose elements share an exponent for each moment. */
INLINE void update_compact(int64_t start, int64_t length, uint16_t *restrict weight, int8_t *restrict remainder,
                           uint8_t *restrict exp_avg, uint8_t *restrict exp_avg_exponent, uint8_t *restrict exp_avg_sq,
                           uint8_t *restrict exp_avg_sq_exponent, const void *restrict gradient, int is_whole,
                           const Constants *c, uint32_t key, uint32_t first) {
    float master[RUN], gradients[RUN], means[RUN], squares[RUN];
    uint32_t noise[RUN];
    int32_t narrow[RUN], other[RUN];
    load_gradients(start, length, gradient, is_whole, gradients);
    request(weight, start, sizeof *weight);
    request(remainder, start, sizeof *remainder);
    request(exp_avg, start, sizeof *exp_avg);
    request(exp_avg_sq, start, sizeof *exp_avg_sq);
    weight += start, remainder += start, exp_avg += start, exp_avg_sq += start, first += (uint32_t)start;
    exp_avg_exponent += start / GROUP, exp_avg_sq_exponent += start / GROUP;
    EACH master[i] = join24(weight[i], remainder[i]);
    for (int64_t group = 0; group < length / GROUP; ++group) {
        int32_t mean_word = lowest_word(exp_avg_exponent[group], EXP_AVG_RANGE);
        int32_t square_word = lowest_word(exp_avg_sq_exponent[group], EXP_AVG_SQ_RANGE);
        for (int64_t i = group * GROUP; i < (group + 1) * GROUP; ++i) means[i] = decode_exp_avg(exp_avg[i], mean_word);
        for (int64_t i = group * GROUP; i < (group + 1) * GROUP; ++i)
            squares[i] = decode_exp_avg_sq(exp_avg_sq[i], square_word);
    }
    EACH master[i] = update(gradients[i], master[i], &means[i], &squares[i], c, 1);
    EACH noise[i] = noise_of(key, first + (uint32_t)i);
    EACH split24(master[i], noise[i], &narrow[i], &other[i]);
    EACH weight[i] = (uint16_t)narrow[i];
    EACH remainder[i] = (int8_t)other[i];
    for (int64_t group = 0; group < length / GROUP; ++group) {
        uint32_t largest_mean = 0, largest_square = 0;
        for (int64_t i = group * GROUP; i < (group + 1) * GROUP; ++i) {
            uint32_t mean = to_bits(means[i]) & 0x7fffffffu, square = to_bits(squares[i]);
            largest_mean = mean > largest_mean ? mean : largest_mean;
            largest_square = square > largest_square ? square : largest_square;
        }
        int32_t mean_exponent = group_exponent(largest_mean, EXP_AVG_RANGE);
        int32_t square_exponent = group_exponent(largest_square, EXP_AVG_SQ_RANGE);
        int32_t mean_word = lowest_word(mean_exponent, EXP_AVG_RANGE);
        int32_t square_word = lowest_word(square_exponent, EXP_AVG_SQ_RANGE);
        for (int64_t i = group * GROUP; i < (group + 1) * GROUP; ++i) {
            narrow[i] = encode_exp_avg(to_bits(means[i]), mean_word);
            other[i] = encode_exp_avg_sq(to_bits(squares[i]), square_word, noise[i]);
        }
        exp_avg_exponent[group] = (uint8_t)mean_exponent;
        exp_avg_sq_exponent[group] = (uint8_t)square_exponent;
    }
    EACH exp_avg[i] = (uint8_t)narrow[i];
    EACH exp_avg_sq[i] = (uint8_t)other[i];
}

void mobius_adamw_compact_bf16(int64_t count, uint16_t *weight, int8_t *remainder, uint8_t *exp_avg,
                               uint8_t *exp_avg_exponent, uint8_t *exp_avg_sq, uint8_t *exp_avg_sq_exponent,
                               const uint16_t *gradient, const Constants *constants, int threads, uint32_t key,
                               uint32_t first) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_compact, weight, remainder, exp_avg, exp_avg_exponent, exp_avg_sq, exp_avg_sq_exponent,
                gradient, 0, &c, key, first)
    UPDATE_LAST_GROUP(update_compact, weight, remainder, exp_avg, exp_avg_exponent, exp_avg_sq, exp_avg_sq_exponent,
                      gradient, 0, &c, key, first)
}

void mobius_adamw_compact_fp32(int64_t count, uint16_t *weight, int8_t *remainder, uint8_t *exp_avg,
                               uint8_t *exp_avg_exponent, uint8_t *exp_avg_sq, uint8_t *exp_avg_sq_exponent,
                               const float *gradient, const Constants *constants, int threads, uint32_t key,
                               uint32_t first) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_compact, weight, remainder, exp_avg, exp_avg_exponent, exp_avg_sq, exp_avg_sq_exponent,
                gradient, 1, &c, key, first)
    UPDATE_LAST_GROUP(update_compact, weight, remainder, exp_avg, exp_avg_exponent, exp_avg_sq, exp_avg_sq_exponent,
                      gradient, 1, &c, key, first)
}
