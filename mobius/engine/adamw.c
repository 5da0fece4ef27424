/* One pass of AdamW over flat arrays: reads gradients, updates moments and master; the weights are part of the master.

   With bf16 weights the master is split: its bits are (bits of the weight << 16) + a 16-bit remainder, as described in
   engine/split_master.py. Each byte is read once, and written at most once. With bf16 gradients this is 26 bytes of
   memory traffic per parameter: gradient 2 (read); weight and remainder 4, both moments 8 (read and written). The
   kernel owns no memory and knows no stages: adamw.py calls it.

   With states in fewer bytes (formats: engine/reduced_states.py) the traffic is 18 bytes with bf16 moments, and 12.1
   bytes with 8-bit moments and a master of 24 bits.

   The arithmetic and its order are those of torch.optim.AdamW(fused=True). No option of the compiler changes values, so
   NaNs and infinities are kept. With -ffp-contract=off, every CPU gives the same bits. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Elements per block. Threads take blocks dynamically, because they share cores with the main thread and other ranks.
   If each thread had fixed blocks, all threads would wait for a thread that lost its core. */
#define BLOCK 32768

/* RUN: elements between two prefetches. AHEAD: distance in elements from a prefetch to the use of the prefetched data
   (docs/decisions/0004-cpu-adamw.md). Separate loops convert 16-bit and 8-bit numbers to arrays of RUN floats, and
   back: one loop over several widths took 1.6 times as long. */
#define RUN 64
#define AHEAD 512
#define CACHE_LINE 64

/* `void mobius_adamw_NAME`, followed by the instruction set if a library has several (adamw_build.py). */
#ifndef INSTRUCTION_SET
#define INSTRUCTION_SET
#endif
#define WITH_SET(name, set) mobius_adamw_##name##set
#define NAMED(name, set) WITH_SET(name, set)
#define KERNEL(name) void NAMED(name, INSTRUCTION_SET)

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

/* Return the new master; update the moments in place. With states in a reduced format, the correction of the root is
   part of other constants, which saves a division: these states need not match the bits of another AdamW. */
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

/* Prefetch RUN elements of `size` bytes, AHEAD elements after `start`; after the array's end it has no effect. */
static inline void request(const void *array, int64_t start, size_t size) {
    uintptr_t address = (uintptr_t)array + (uintptr_t)(start + AHEAD) * size;
    for (size_t offset = 0; offset < RUN * size; offset += CACHE_LINE)
        __builtin_prefetch((const void *)(address + offset));
}

/* UPDATE_RUNS calls UPDATE(start, length, ...) for LENGTH elements at a time, in blocks that `threads` OpenMP threads
   share. The length is a constant and UPDATE is inlined, so that its loops are unrolled. UPDATE_REST calls UPDATE for
   each element after the complete runs, UPDATE_LAST_GROUP for one group (half a run) after the runs. */
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
KERNEL(fp32)(int64_t count, float *master, float *exp_avg, float *exp_avg_sq, const float *gradient,
             const Constants *constants, int threads) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_whole, master, exp_avg, exp_avg_sq, gradient, &c)
    UPDATE_REST(update_whole, master, exp_avg, exp_avg_sq, gradient, &c)
}

/* Load the gradients from `start` on as floats; they are stored as fp32 if `is_whole`, else as bf16. */
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

/* Kernels with a split master; a name ends with the type of the gradient, here and below. */
KERNEL(split_bf16)(int64_t count, uint16_t *weight, int16_t *remainder, float *exp_avg, float *exp_avg_sq,
                   const uint16_t *gradient, const Constants *constants, int threads) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_split, weight, remainder, exp_avg, exp_avg_sq, gradient, 0, &c)
    UPDATE_REST(update_split, weight, remainder, exp_avg, exp_avg_sq, gradient, 0, &c)
}

KERNEL(split_fp32)(int64_t count, uint16_t *weight, int16_t *remainder, float *exp_avg, float *exp_avg_sq,
                   const float *gradient, const Constants *constants, int threads) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_split, weight, remainder, exp_avg, exp_avg_sq, gradient, 1, &c)
    UPDATE_REST(update_split, weight, remainder, exp_avg, exp_avg_sq, gradient, 1, &c)
}

/* States in fewer bytes. Stochastic rounding needs noise: a hash of an element's index within its parameter (lowbias32,
   by Chris Wellons) and a key, so that neither threads nor the division into stages change a bit. */
static inline uint32_t noise_of(uint32_t key, uint32_t index) {
    uint32_t x = index ^ key;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

static inline int is_finite(uint32_t bits) { return (bits & 0x7f800000u) != 0x7f800000u; }

/* bf16 moments: the first is rounded to nearest, the second stochastically. Rounded to nearest, the second would never
   decay: a thousandth of a number is less than half of its last bit. */
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

KERNEL(bf16_states_bf16)(int64_t count, uint16_t *weight, int16_t *remainder, uint16_t *exp_avg, uint16_t *exp_avg_sq,
                         const uint16_t *gradient, const Constants *constants, int threads, uint32_t key,
                         uint32_t first) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_bf16_states, weight, remainder, exp_avg, exp_avg_sq, gradient, 0, &c, key, first)
    UPDATE_REST(update_bf16_states, weight, remainder, exp_avg, exp_avg_sq, gradient, 0, &c, key, first)
}

KERNEL(bf16_states_fp32)(int64_t count, uint16_t *weight, int16_t *remainder, uint16_t *exp_avg, uint16_t *exp_avg_sq,
                         const float *gradient, const Constants *constants, int threads, uint32_t key, uint32_t first) {
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_bf16_states, weight, remainder, exp_avg, exp_avg_sq, gradient, 1, &c, key, first)
    UPDATE_REST(update_bf16_states, weight, remainder, exp_avg, exp_avg_sq, gradient, 1, &c, key, first)
}

/* 8-bit moments relative to a power of two for each group, and a master of 24 bits. The code uses explicit vectors: for
   loops over bytes, a compiler made up to 1.8 times as many instructions (docs/performance.md).

   A word of codes has four consecutive elements. So fp32 numbers are held in four planes, each with every fourth one;
   shifts and masks within words widen and narrow them. A moment's code comes from the upper half of its fp32 word: the
   code is (half - base) / 16, where base is the half for which code 0 would stand in the group. Halves are held in
   pairs: a word has the halves of elements 0 and 2 of four ("even"), or of elements 1 and 3 ("odd"). */
#define GROUP 32
#define EXP_AVG_RANGE 15
#define EXP_AVG_SQ_RANGE 31
#define LARGEST_EXPONENT 254
#define LARGEST_HALF 0x7f70u /* gives the largest code, of 7 or 8 bits, in a group with the largest exponent */
#ifdef __AVX512BW__
#define LANES 16
#elif defined __AVX2__
#define LANES 8
#else
#define LANES 4
#endif
#define VECTORS (LANES < 8 ? 2 : 1)
#define UNIT (4 * LANES * VECTORS) /* elements that are updated together: one group or two */
#ifdef __clang__
#define AS_VECTOR
#else
#define AS_VECTOR _Pragma("GCC unroll 1") /* otherwise GCC unrolls before it vectorizes */
#endif
#define EACH_OF(count) _Pragma("GCC unroll 8") for (int k = 0; k < (count); ++k)
#define EACH_WORD AS_VECTOR for (int i = 0; i < LANES; ++i)
#define EACH_HALF AS_VECTOR for (int i = 0; i < 2 * LANES; ++i)
#define PAIR(lower, upper) ((uint32_t)(upper) << 16 | (uint32_t)(lower))
#define LOWER PAIR(0xffffu, 0)
#define UPPER PAIR(0, 0xffffu)
#define SIGNS PAIR(0x8000u, 0x8000u)
#define UPPER_BYTES PAIR(0xff00u, 0xff00u)
#define BYTE_SIGNS PAIR(0x8080u, 0x8080u)

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));

typedef struct {
    uint16_t *weight;
    int8_t *remainder;
    uint8_t *exp_avg, *exp_avg_exponent, *exp_avg_sq, *exp_avg_sq_exponent;
    const void *gradient;
} Arrays;

INLINE Words load(const void *array, int vector) {
    Words words;
    memcpy(&words, (const char *)array + vector * (int)sizeof words, sizeof words);
    return words;
}

INLINE void store(void *array, int vector, Words words) {
    memcpy((char *)array + vector * (int)sizeof words, &words, sizeof words);
}

INLINE Words all(uint32_t word) { return (Words){0} + word; }

/* Operations on pairs: the larger, the lesser, `value` where `compared` >= `least` (else 0), and a shift down. */
INLINE Words larger(Words a, Words b) {
    Halves x = (Halves)a, y = (Halves)b;
    EACH_HALF x[i] = x[i] > y[i] ? x[i] : y[i];
    return (Words)x;
}

INLINE Words lesser(Words a, Words b) {
    Halves x = (Halves)a, y = (Halves)b;
    EACH_HALF x[i] = x[i] < y[i] ? x[i] : y[i];
    return (Words)x;
}

INLINE Words where(Words compared, uint16_t least, Words value) {
    Halves x = (Halves)compared, y = (Halves)value;
    EACH_HALF y[i] = x[i] >= least ? y[i] : 0;
    return (Words)y;
}

INLINE Words down(Words pairs, int by) { return (Words)((Halves)pairs >> by); }

INLINE Floats root(Floats value) {
    EACH_WORD value[i] = sqrtf(value[i]);
    return value;
}

/* 0, 1, 2 and so on. */
INLINE Words counted(void) {
    Words index;
    EACH_WORD index[i] = (uint32_t)i;
    return index;
}

/* Pick words by their index in the words of `a` followed by the words of `b`. */
INLINE Words pick(Words a, Words b, Words index) {
#ifdef __clang__
    Words picked;
    for (int i = 0; i < LANES; ++i) picked[i] = index[i] < LANES ? a[index[i]] : b[index[i] - LANES];
    return picked;
#else
    return __builtin_shuffle(a, b, index);
#endif
}

INLINE Words every_second(Words a, Words b, int first) { return pick(a, b, 2 * counted() + (uint32_t)first); }

/* widen: fp32 words from one half of pairs. narrow: pairs from the upper halves of fp32 words. */
INLINE Words widen(Words pairs, int is_upper) { return is_upper ? pairs & UPPER : pairs << 16; }
INLINE Words narrow(Words a, Words b) { return a >> 16 | (b & UPPER); }

/* Load fp32 gradients as four planes, bf16 gradients as two vectors of pairs: elements 0 and 1 of each four, and 2
   and 3. NaNs are replaced: rounding adds to words, and an fp32 NaN with all bits set would become a number. */
INLINE void load_gradients_of_fours(const void *gradient, int is_whole, Words loaded[4]) {
    Words a = load(gradient, 0), b = load(gradient, 1);
    loaded[0] = every_second(a, b, 0), loaded[1] = every_second(a, b, 1);
    if (is_whole) {
        Words c = load(gradient, 2), d = load(gradient, 3);
        EACH_OF(2) {
            Words lower = loaded[k], upper = every_second(c, d, k);
            loaded[k] = every_second(lower, upper, 0), loaded[k + 2] = every_second(lower, upper, 1);
        }
        EACH_OF(4) {
            Words is_nan = (Words)((Floats)loaded[k] != (Floats)loaded[k]);
            loaded[k] = (loaded[k] & ~is_nan) | (is_nan & 0x7fc00000u);
        }
    }
}

/* Load halves of moments; `magnitude` and `sign` are masks of the bits of a code in them. */
INLINE void load_moments(const uint8_t *codes, const uint8_t *exponents, int range, uint32_t magnitude, uint32_t sign,
                         Words halves[2]) {
    uint32_t own = PAIR(128, 128) * (uint32_t)(exponents[0] - range);
    uint32_t next = PAIR(128, 128) * (uint32_t)(exponents[UNIT / GROUP - 1] - range);
    Words words = load(codes, 0), base, even = words << 4 & magnitude, odd = words >> 4 & magnitude;
    EACH_WORD base[i] = i < 8 ? own : next;
    halves[0] = where(even, 1, even + base) | (words << 8 & sign);
    halves[1] = where(odd, 1, odd + base) | (words & sign);
}

/* Update a plane, and add the noise to second moments. Return the words of new masters plus noise and 0x8000: their
   upper half is the rounded weight. */
INLINE Words update_plane(Words gradient, Words master, Words *mean, Words *square, Words noise, const Constants *c) {
    Floats scaled = (Floats)gradient * c->gradient_factor, m = (Floats)*mean, v = (Floats)*square;
    m = m + (scaled - m) * c->one_minus_beta1;
    v = v * c->beta2 + c->one_minus_beta2 * scaled * scaled;
    *mean = (Words)m;
    *square = (Words)v + noise;
    return (Words)((Floats)master * c->decay - c->step_size * m / (root(v) + c->epsilon)) + ((noise & 0xffu) | 0x8000u);
}

INLINE void store_masters(void *weight, void *remainder, const Words plane[4]) {
    Words a = narrow(plane[0], plane[1]), b = narrow(plane[2], plane[3]);
    Words order = counted() / 2 + (counted() & 1) * LANES;
    store(weight, 0, pick(a, b, order));
    store(weight, 1, pick(a, b, order + LANES / 2));
    Words even = (plane[0] & LOWER) | plane[2] << 16, odd = (plane[1] & LOWER) | plane[3] << 16;
    store(remainder, 0, (down(even, 8) | (odd & UPPER_BYTES)) ^ BYTE_SIGNS);
}

INLINE Arrays arrays_from(const Arrays *a, int64_t start, int is_whole) {
    return (Arrays){a->weight + start, a->remainder + start, a->exp_avg + start, a->exp_avg_exponent + start / GROUP,
                    a->exp_avg_sq + start, a->exp_avg_sq_exponent + start / GROUP,
                    (const char *)a->gradient + (is_whole ? 4 : 2) * start};
}

/* Update the elements of one vector of codes; `first` is the index of its first element in the parameter. Store all but
   the moments; return their halves. Four elements share 32 bits of noise; each uses 20, from another byte on. */
INLINE void update_fours(const Arrays *a, int is_whole, const Constants *c, uint32_t key, uint32_t first,
                         Words means[2], Words squares[2]) {
    Words gradient[4], master[4], mean[4], square[4], noise;
    load_gradients_of_fours(a->gradient, is_whole, gradient);
    load_moments(a->exp_avg, a->exp_avg_exponent, EXP_AVG_RANGE, PAIR(0x7f0u, 0x7f0u), SIGNS, means);
    load_moments(a->exp_avg_sq, a->exp_avg_sq_exponent, EXP_AVG_SQ_RANGE, PAIR(0xff0u, 0xff0u), 0, squares);
    Words low = load(a->weight, 0), high = load(a->weight, 1);
    Words weights[2] = {every_second(low, high, 0), every_second(low, high, 1)};
    Words rest = load(a->remainder, 0) ^ BYTE_SIGNS; /* (w << 16) + (r << 8) = (w << 16 | (r ^ 0x80) << 8) - 0x8000 */
    EACH_WORD noise[i] = noise_of(key, first / 4 + (uint32_t)i);
    EACH_OF(4) {
        Words bytes = (k % 2 ? rest : rest << 8) & UPPER_BYTES;
        Words joined = (widen(weights[k / 2], k % 2) | (k / 2 ? bytes >> 16 : bytes & LOWER)) - 0x8000u;
        Words own = is_whole ? gradient[k] : widen(gradient[k / 2], k % 2);
        mean[k] = widen(means[k % 2], k / 2), square[k] = widen(squares[k % 2], k / 2);
        master[k] = update_plane(own, joined, &mean[k], &square[k], noise >> 12, c);
        noise = noise >> 8 | noise << 24;
    }
    EACH_OF(2)
        means[k] = narrow(mean[k], mean[k + 2]), squares[k] = narrow(square[k], square[k + 2]);
    store_masters(a->weight, a->remainder, master);
}

/* Update whole groups, whose elements share an exponent for each moment. */
INLINE void update_unit(const Arrays *a, int is_whole, const Constants *c, uint32_t key, uint32_t first) {
    Words means[2 * VECTORS], squares[2 * VECTORS], signs[2 * VECTORS], x, y;
    EACH_OF(VECTORS) {
        const Arrays own = arrays_from(a, k * 4 * LANES, is_whole);
        update_fours(&own, is_whole, c, key, first + (uint32_t)k * 4 * LANES, &means[2 * k], &squares[2 * k]);
    }
    EACH_OF(2 * VECTORS) {
        signs[k] = means[k] & SIGNS, means[k] ^= signs[k];
        x = k ? larger(x, means[k]) : means[k], y = k ? larger(y, squares[k]) : squares[k];
    }
    Words largest = larger((x & LOWER) | y << 16, narrow(x, y)); /* each pair has both moments */
    for (uint32_t by = 1; by < 8 && by < LANES; by *= 2)
        largest = larger(largest, pick(largest, largest, counted() ^ by));
    largest = larger(down(largest, 7), all(PAIR(EXP_AVG_RANGE, EXP_AVG_SQ_RANGE)));
    largest = lesser(largest, all(PAIR(LARGEST_EXPONENT - 1, LARGEST_EXPONENT - 1)));
    uint32_t is_over = 0;
    for (int group = 0; group < UNIT / GROUP; ++group) {
        uint32_t exponents = largest[8 * group] + PAIR(1, 1);
        a->exp_avg_exponent[group] = (uint8_t)exponents, a->exp_avg_sq_exponent[group] = (uint8_t)(exponents >> 16);
        is_over |= exponents + PAIR(256 - LARGEST_EXPONENT, 256 - LARGEST_EXPONENT);
    }
    if (__builtin_expect((is_over & PAIR(256, 256)) != 0, 0))
        EACH_OF(2 * VECTORS) {
            means[k] = lesser(means[k], all(PAIR(LARGEST_HALF, LARGEST_HALF)));
            squares[k] = lesser(squares[k], all(PAIR(LARGEST_HALF, LARGEST_HALF)));
        }
    /* 8 less rounds first moments to nearest. 16 more gives code 1, the smallest of second moments other than zero. */
    Words bases = (largest << 7) - PAIR((EXP_AVG_RANGE - 1) * 128 + 8, (EXP_AVG_SQ_RANGE - 1) * 128);
    Words base = (bases & LOWER) | bases << 16, square_base = narrow(bases, bases);
    EACH_OF(2 * VECTORS) {
        means[k] = (larger(means[k], base) - base) << 4 | signs[k];
        Words raised = larger(squares[k], square_base + PAIR(16, 16)) - square_base;
        squares[k] = where(squares[k], 16, down(raised, 4));
    }
    EACH_OF(VECTORS) {
        store(a->exp_avg, k, down(means[2 * k], 8) | (means[2 * k + 1] & UPPER_BYTES));
        store(a->exp_avg_sq, k, squares[2 * k] | squares[2 * k + 1] << 8);
    }
}

INLINE void update_compact(int64_t start, int64_t length, const Arrays *a, int is_whole, const Constants *c,
                           uint32_t key, uint32_t first) {
    request(a->weight, start, 2), request(a->remainder, start, 1), request(a->gradient, start, is_whole ? 4 : 2);
    request(a->exp_avg, start, 1), request(a->exp_avg_sq, start, 1);
    for (int64_t i = start; i < start + length; i += UNIT) {
        const Arrays unit = arrays_from(a, i, is_whole);
        update_unit(&unit, is_whole, c, key, first + (uint32_t)i);
    }
}

/* Update one group, in copies of the arrays that are as long as a unit. */
INLINE void update_last_compact(int64_t start, int64_t length, const Arrays *a, int is_whole, const Constants *c,
                                uint32_t key, uint32_t first) {
    struct {
        char weight[2 * UNIT], remainder[UNIT], exp_avg[UNIT], exponent[4], exp_avg_sq[UNIT], sq_exponent[4],
            gradient[4 * UNIT];
    } own = {{0}};
    const Arrays b = arrays_from(a, start, is_whole);
    const struct {
        void *array, *copy;
        int64_t size;
    } all[] = {{b.weight, own.weight, 2 * length},         {b.remainder, own.remainder, length},
               {b.exp_avg, own.exp_avg, length},           {b.exp_avg_exponent, own.exponent, 1},
               {b.exp_avg_sq, own.exp_avg_sq, length},     {b.exp_avg_sq_exponent, own.sq_exponent, 1},
               {(void *)b.gradient, own.gradient, (is_whole ? 4 : 2) * length}};
    for (int k = 0; k < 7; ++k) memcpy(all[k].copy, all[k].array, (size_t)all[k].size);
    const Arrays unit = {all[0].copy, all[1].copy, all[2].copy, all[3].copy, all[4].copy, all[5].copy, all[6].copy};
    update_unit(&unit, is_whole, c, key, first + (uint32_t)start);
    for (int k = 0; k < 6; ++k) memcpy(all[k].array, all[k].copy, (size_t)all[k].size);
}

KERNEL(compact_bf16)(int64_t count, uint16_t *weight, int8_t *remainder, uint8_t *exp_avg, uint8_t *exp_avg_exponent,
                     uint8_t *exp_avg_sq, uint8_t *exp_avg_sq_exponent, const uint16_t *gradient,
                     const Constants *constants, int threads, uint32_t key, uint32_t first) {
    const Arrays a = {weight, remainder, exp_avg, exp_avg_exponent, exp_avg_sq, exp_avg_sq_exponent, gradient};
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_compact, &a, 0, &c, key, first)
    UPDATE_LAST_GROUP(update_last_compact, &a, 0, &c, key, first)
}

KERNEL(compact_fp32)(int64_t count, uint16_t *weight, int8_t *remainder, uint8_t *exp_avg, uint8_t *exp_avg_exponent,
                     uint8_t *exp_avg_sq, uint8_t *exp_avg_sq_exponent, const float *gradient,
                     const Constants *constants, int threads, uint32_t key, uint32_t first) {
    const Arrays a = {weight, remainder, exp_avg, exp_avg_exponent, exp_avg_sq, exp_avg_sq_exponent, gradient};
    const Constants c = *constants;
    UPDATE_RUNS(RUN, update_compact, &a, 1, &c, key, first)
    UPDATE_LAST_GROUP(update_last_compact, &a, 1, &c, key, first)
}
