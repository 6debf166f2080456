/* Linear layers whose products are int8, and all of a BERT layer that follows its attention, forward
 * only. int8.py compiles this file.
 *
 * Weights have a scale per output channel and are symmetric. An activation has a scale and a zero
 * point per token, which depend on that token alone: x ≈ scale · (q − zero), q in 0 … 255. Integer
 * sums are exact in any order, and all floating-point work is per token in a fixed order, so the
 * result for a token is the same bit by bit whatever else is in the batch.
 *
 * A thread takes a block of tokens through all steps; what is between them stays in its second-level
 * cache. With AVX-512 VNNI, VPDPBUSD multiplies four unsigned by four signed bytes and adds them to
 * an int32 without saturation. With AVX2, VPMADDWD does so with two pairs of 16 bits, to which
 * weights are widened as they are read and activations when they are rounded: VPMADDUBSW would take
 * bytes, but saturates, so its results would be those of 7 bits. Weights lie as they are read:
 * [panel][inputs / GROUP][channel of PANEL][input of GROUP].
 */

#include <math.h>
#include <stdatomic.h>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define LANES 16
#define VECTORS 4 /* of a panel */
#define GROUP 4   /* inputs that an instruction adds up */
typedef unsigned char number; /* a rounded activation */
#else
#define LANES 8
#define VECTORS 2
#define GROUP 2
typedef short number;
#endif
#define PANEL (LANES * VECTORS)
#define ROWS 6 /* tokens of a tile: ROWS × VECTORS sums, VECTORS weights and a broadcast in registers */
#define EACH_ROW UNROLL for (int r = 0; r < rows; r++)
#define EACH_VECTOR UNROLL for (int v = 0; v < VECTORS; v++)

#include "vectors.h"

/* Mirrored by int8.py. Arrays have zeros for channels from `outputs` to a multiple of 64. */
typedef struct {
    const int8_t *weight; /* as packhorse_int8_pack writes it */
    const float *scale, *bias;
    const int32_t *sums; /* of the weights of a channel */
    long inputs, outputs;
} Linear;

typedef struct {
    const float *weight, *bias;
    long width;
    float eps;
} Norm;

/* Activations of a block of tokens */
typedef struct {
    number *q; /* [tokens, step] */
    float *scale;
    int32_t *zero;
    long step;
} Quantized;

/* Rows of numbers, fp32 or bf16 */
typedef struct {
    void *at;
    long width;
    int bf16;
} Rows;

INLINE long padded(long inputs) { return (inputs + 3) / 4 * 4; }

/* Rows are read in blocks of four vectors, because a chain of sums or minima through one register
 * would wait for itself. `left` is a constant in all blocks but the last, which needs masks. */
#define BLOCK (4 * LANES)
#define EACH_IN_BLOCK UNROLL for (int j = 0; j < 4; j++)
#define EACH_BLOCK(width, i, left, body)                                                           \
    do {                                                                                           \
        long i = 0;                                                                                \
        for (; i + BLOCK <= (width); i += BLOCK) {                                                 \
            const long left = BLOCK;                                                               \
            body;                                                                                  \
        }                                                                                          \
        if (i < (width)) {                                                                         \
            const long left = (width) - i;                                                         \
            body;                                                                                  \
        }                                                                                          \
    } while (0)

/* ---- what differs between AVX-512 and AVX2; `n` numbers are left in the row ---- */

#if LANES == 16

INLINE __mmask16 lanes(long n) { return n >= LANES ? 0xffff : n > 0 ? (__mmask16)((1u << n) - 1) : 0; }
INLINE vec load_some(const float *from, long n) { return (vec)_mm512_maskz_loadu_ps(lanes(n), from); }
INLINE void store_some(float *to, long n, vec x) { _mm512_mask_storeu_ps(to, lanes(n), (__m512)x); }
INLINE ivec load_halves(const uint16_t *from, long n) {
    return (ivec)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(n), from));
}
INLINE void store_halves(uint16_t *to, long n, ivec x) {
    _mm256_mask_storeu_epi16(to, lanes(n), _mm512_cvtepi32_epi16((__m512i)x));
}
INLINE vec some(vec x, long n) { return (vec)_mm512_maskz_mov_ps(lanes(n), (__m512)x); }
INLINE ivec nearest(vec x) { return (ivec)_mm512_cvtps_epi32((__m512)x); }
INLINE vec least_of(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }

/* A block of integers as numbers; `room`: how many may be written. */
INLINE void store_numbers(number *to, const ivec *n, long room) {
    /* Packing works within quarters of a register, so quarters end up in this order. */
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m512i bytes = _mm512_packus_epi16(_mm512_packs_epi32((__m512i)n[0], (__m512i)n[1]),
                                        _mm512_packs_epi32((__m512i)n[2], (__m512i)n[3]));
    bytes = _mm512_permutexvar_epi32(order, bytes);
    if (room >= BLOCK) _mm512_storeu_si512(to, bytes);
    else _mm512_mask_storeu_epi8(to, ~0ull >> (BLOCK - room), bytes);
}

INLINE ivec load_weights(const int8_t *from) { return (ivec)_mm512_loadu_si512(from); }
INLINE ivec multiply_add(ivec sum, ivec x, ivec w) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
}

#else

INLINE __m256i lanes(long n) {
    const ivec index = {0, 1, 2, 3, 4, 5, 6, 7};
    return (__m256i)(index < (int32_t)(n < LANES ? n : LANES));
}
INLINE vec load_some(const float *from, long n) {
    return n >= LANES ? load(from) : (vec)_mm256_maskload_ps(from, lanes(n));
}
INLINE void store_some(float *to, long n, vec x) {
    if (n >= LANES) store(to, x);
    else _mm256_maskstore_ps(to, lanes(n), (__m256)x);
}
INLINE ivec load_halves(const uint16_t *from, long n) {
    uint16_t halves[LANES] = {0};
    if (n > 0) memcpy(halves, from, 2 * least(n, LANES));
    return (ivec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)halves));
}
INLINE void store_halves(uint16_t *to, long n, ivec x) {
    uint16_t halves[LANES];
    __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x); /* of both halves, twice each */
    packed = _mm256_permute4x64_epi64(packed, 0x08);
    _mm_storeu_si128((__m128i *)halves, _mm256_castsi256_si128(packed));
    if (n > 0) memcpy(to, halves, 2 * least(n, LANES));
}
INLINE vec some(vec x, long n) {
    return n >= LANES ? x : (vec)_mm256_and_ps((__m256)x, (__m256)lanes(n));
}
INLINE ivec nearest(vec x) { return (ivec)_mm256_cvtps_epi32((__m256)x); }
INLINE vec least_of(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }

INLINE void store_numbers(number *to, const ivec *n, long room) {
    __m256i halves[2];
    for (int i = 0; i < 2; i++) {
        halves[i] = _mm256_packus_epi32((__m256i)n[2 * i], (__m256i)n[2 * i + 1]);
        halves[i] = _mm256_permute4x64_epi64(halves[i], 0xd8); /* it packs halves of a register */
        halves[i] = _mm256_min_epu16(halves[i], _mm256_set1_epi16(255));
    }
    memcpy(to, halves, sizeof(number) * least(room, BLOCK));
}

INLINE ivec load_weights(const int8_t *from) {
    return (ivec)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
}
INLINE ivec multiply_add(ivec sum, ivec x, ivec w) {
    return sum + (ivec)_mm256_madd_epi16((__m256i)x, (__m256i)w);
}

#endif

INLINE ivec larger_integer(ivec a, ivec b) {
    ivec first = a > b;
    return (first & a) | (~first & b);
}

/* Of the lanes of a vector, in halves, quarters and so on */
#define REDUCE(name, type, result, combine)                                                        \
    INLINE result name(type x) {                                                                   \
        result lane[LANES];                                                                        \
        memcpy(lane, &x, sizeof x);                                                                \
        UNROLL for (int n = LANES / 2; n; n /= 2)                                                  \
            UNROLL for (int i = 0; i < n; i++) lane[i] = combine(lane[i], lane[i + n]);            \
        return lane[0];                                                                            \
    }
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define LESSER(a, b) ((a) < (b) ? (a) : (b))
#define PLUS(a, b) ((a) + (b))
REDUCE(highest, vec, float, LARGER)
REDUCE(lowest, vec, float, LESSER)
REDUCE(highest_integer, ivec, int32_t, LARGER)
REDUCE(sum_of, vec, float, PLUS)

INLINE vec read(const Rows *rows, long row, long column, long n) {
    const long i = row * rows->width + column;
    if (!rows->bf16) return load_some((const float *)rows->at + i, n);
    return (vec)(load_halves((const uint16_t *)rows->at + i, n) << 16);
}

INLINE void write(const Rows *rows, long row, long column, long n, vec x) {
    const long i = row * rows->width + column;
    if (!rows->bf16) {
        store_some((float *)rows->at + i, n, x);
        return;
    }
    /* to nearest, ties to even; the carry must not turn a NaN into infinity or zero */
    typedef uint32_t bits_of __attribute__((vector_size(4 * LANES)));
    bits_of bits = (bits_of)x, nan = (bits_of)(x != x);
    bits = (bits + (bits >> 16 & 1) + 0x7fff) >> 16;
    store_halves((uint16_t *)rows->at + i, n, (ivec)((nan & 0x7fc0) | (~nan & bits)));
}

/* ---- quantization ---- */

typedef struct {
    vec low[4], high[4];
    ivec size[4]; /* the largest magnitude, as an integer, which sees NaN and infinity */
} Range;

INLINE void widen(Range *range, const Rows *from, long row, long i, long left) {
    EACH_IN_BLOCK {
        vec x = read(from, row, i + j * LANES, left - j * LANES);
        range->low[j] = least_of(range->low[j], x);
        range->high[j] = larger(range->high[j], x);
        range->size[j] = larger_integer(range->size[j], (ivec)x & 0x7fffffff);
    }
}

INLINE void round_block(const Rows *from, long row, long i, long left, float steps, int32_t zero,
                        number *q, long room) {
    ivec n[4];
    EACH_IN_BLOCK n[j] = nearest(read(from, row, i + j * LANES, left - j * LANES) * steps) + zero;
    store_numbers(q + i, n, left == BLOCK ? BLOCK : room);
}

INLINE void quantize_rows(const Rows *from, long first, long count, const Quantized *to) {
    const long width = from->width;
    for (long row = 0; row < count; row++) {
        Range range = {0};
        EACH_BLOCK(width, i, left, widen(&range, from, first + row, i, left));
        for (int j = 1; j < 4; j++) {
            range.low[0] = least_of(range.low[0], range.low[j]);
            range.high[0] = larger(range.high[0], range.high[j]);
            range.size[0] = larger_integer(range.size[0], range.size[j]);
        }
        const float bottom = lowest(range.low[0]);
        const float scale = (highest(range.high[0]) - bottom) / 255;
        const float steps = scale > 1e-30f ? 1 / scale : 0;
        const int finite = highest_integer(range.size[0]) < 0x7f800000;
        const int32_t zero = finite ? (int32_t)rintf(-bottom * steps) : 0;
        to->scale[row] = finite ? scale : NAN;
        to->zero[row] = zero;
        number *q = to->q + row * to->step;
        EACH_BLOCK(width, i, left,
                   round_block(from, first + row, i, left, steps, zero, q, to->step - i));
    }
}

/* The range of a row includes 0, so that 0 is exact. A row with NaN or infinity gets the scale NaN,
 * which makes its results NaN. */
APART void quantize(const Rows *from, long first, long count, const Quantized *to) {
    Rows rows = *from;
    rows.bf16 = 0; /* a constant below: no branch per vector */
    if (from->bf16) rows.bf16 = 1, quantize_rows(&rows, first, count, to);
    else quantize_rows(&rows, first, count, to);
}

/* ---- products ---- */

/* Sums of a tile, in integers: `to` is [rows][PANEL]. */
INLINE void tile(const number *x, long step, const int8_t *weight, int32_t *to, const int rows) {
    ivec sums[ROWS][VECTORS];
    EACH_ROW EACH_VECTOR sums[r][v] = (ivec){0};
    for (long i = 0; i < step; i += GROUP, weight += GROUP * PANEL) {
        ivec w[VECTORS];
        EACH_VECTOR w[v] = load_weights(weight + v * GROUP * LANES);
        EACH_ROW {
            int32_t word; /* GROUP numbers */
            memcpy(&word, x + r * step + i, 4);
            const ivec all = (ivec){0} + word;
            EACH_VECTOR sums[r][v] = multiply_add(sums[r][v], all, w[v]);
        }
    }
    EACH_ROW EACH_VECTOR memcpy(to + r * PANEL + v * LANES, &sums[r][v], sizeof(ivec));
}

APART void sum_tile(const number *x, long step, const int8_t *weight, int32_t *to, long rows) {
    switch (rows) {
    case 1: tile(x, step, weight, to, 1); return;
    case 2: tile(x, step, weight, to, 2); return;
    case 3: tile(x, step, weight, to, 3); return;
    case 4: tile(x, step, weight, to, 4); return;
    case 5: tile(x, step, weight, to, 5); return;
    default: tile(x, step, weight, to, ROWS);
    }
}

/* x Φ(x) to 1.5e-7, by Abramowitz and Stegun 7.1.26, which is shorter than `gelu`: results are
 * rounded to 256 steps. */
INLINE vec short_gelu(vec x) {
    const vec size = (vec)((ivec)x & 0x7fffffff);
    const vec t = 1 / (1 + size * 0.23164190f); /* 0.3275911 / √2 */
    vec p = t * 1.061405429f - 1.453152027f;
    p = ((p * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f;
    const vec tail = p * t * power_of_two(x * x * -0.72134752f) * 0.5f; /* exp(−x²/2) */
    /* x − x·tail above 0, x·tail below: both are max(x, 0) − |x|·tail */
    return larger(splat(0), x) - size * tail;
}

INLINE void write_vectors(const Linear *linear, const Quantized *x, long row, long rows, long panel,
                          const int32_t *sums, const Rows *out, long first,
                          const enum activation activation) {
    for (int v = 0; v < VECTORS; v++) {
        const long column = panel * PANEL + v * LANES, n = linear->outputs - column;
        if (n <= 0) return;
        ivec total;
        memcpy(&total, linear->sums + column, sizeof total);
        const vec scale = load(linear->scale + column), bias = load(linear->bias + column);
        for (long r = 0; r < rows; r++) {
            ivec sum;
            memcpy(&sum, sums + r * PANEL + v * LANES, sizeof sum);
            vec y = __builtin_convertvector(sum - total * x->zero[row + r], vec);
            y = y * x->scale[row + r] * scale + bias;
            y = activation == GELU ? short_gelu(y) : activate(y, activation);
            write(out, first + row + r, column, n, y);
        }
    }
}

APART void write_tile(const Linear *linear, const Quantized *x, long row, long rows, long panel,
                      const int32_t *sums, int activation, const Rows *out, long first) {
    switch (activation) { /* a constant in each call: no branch per vector */
    case GELU: write_vectors(linear, x, row, rows, panel, sums, out, first, GELU); return;
    case GELU_TANH: write_vectors(linear, x, row, rows, panel, sums, out, first, GELU_TANH); return;
    case RELU: write_vectors(linear, x, row, rows, panel, sums, out, first, RELU); return;
    default: write_vectors(linear, x, row, rows, panel, sums, out, first, NONE);
    }
}

/* Rows `first` … of `out` become the layer's results for `count` tokens. */
static void multiply(const Linear *linear, const Quantized *x, long count, int activation,
                     const Rows *out, long first) {
    const long panels = (linear->outputs + PANEL - 1) / PANEL;
    _Alignas(64) int32_t sums[ROWS * PANEL];
    for (long panel = 0; panel < panels; panel++)
        for (long row = 0; row < count; row += ROWS) {
            const long rows = least(ROWS, count - row);
            sum_tile(x->q + row * x->step, x->step, linear->weight + panel * PANEL * x->step, sums,
                     rows);
            write_tile(linear, x, row, rows, panel, sums, activation, out, first);
        }
}

/* Reorder a weight [outputs, inputs] as `Linear.weight` needs it; `to` is zero beforehand, and has
 * room for `outputs` rounded up to 64 and `inputs` to 4. */
void packhorse_int8_pack(const int8_t *weight, int8_t *to, long inputs, long outputs) {
    const long step = padded(inputs);
    for (long n = 0; n < outputs; n++)
        for (long k = 0; k < inputs; k++)
            to[((n / PANEL * step + k / GROUP * GROUP) * PANEL) + n % PANEL * GROUP + k % GROUP] =
                weight[n * inputs + k];
}

/* ---- LayerNorm of x + residual, two passes as in add_norm.c ---- */

INLINE float total(const vec *sums) { return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])); }

INLINE void add(float *x, const Rows *residual, long row, long i, long left, vec *sums) {
    EACH_IN_BLOCK {
        const long column = i + j * LANES, n = left - j * LANES;
        vec y = load_some(x + column, n) + read(residual, row, column, n);
        store_some(x + column, n, y);
        sums[j] += y;
    }
}

INLINE void deviate(const float *x, float mean, long i, long left, vec *squares) {
    EACH_IN_BLOCK {
        const long n = left - j * LANES;
        vec y = some(load_some(x + i + j * LANES, n) - mean, n);
        squares[j] += y * y;
    }
}

INLINE void scale_block(const Norm *norm, const float *x, float mean, float scale, const Rows *out,
                        long row, long i, long left) {
    EACH_IN_BLOCK {
        const long column = i + j * LANES, n = left - j * LANES;
        vec y = (load_some(x + column, n) - mean) * scale;
        y = y * load_some(norm->weight + column, n) + load_some(norm->bias + column, n);
        write(out, row, column, n, y);
    }
}

/* `x` is fp32 and overwritten. */
APART void add_norm(const Norm *norm, const Rows *x, const Rows *residual, long first,
                    const Rows *out, long out_first, long count) {
    const long width = norm->width;
    for (long row = 0; row < count; row++) {
        float *sum = (float *)x->at + row * width;
        vec sums[4] = {0}, squares[4] = {0};
        EACH_BLOCK(width, i, left, add(sum, residual, first + row, i, left, sums));
        const float mean = total(sums) / width;
        EACH_BLOCK(width, i, left, deviate(sum, mean, i, left, squares));
        const float scale = 1 / sqrtf(total(squares) / width + norm->eps);
        EACH_BLOCK(width, i, left,
                   scale_block(norm, sum, mean, scale, out, out_first + row, i, left));
    }
}

/* ---- work items: blocks of tokens ---- */

typedef struct {
    const Linear *linear; /* one, or the three of a layer: attention's output, up, down */
    const Norm *norms;    /* NULL, or the two of a layer */
    Rows x, residual, out;
    char *scratch; /* [threads, scratch_bytes], 64 bytes aligned */
    long tokens, block, scratch_bytes;
    int activation;
    atomic_long next, threads;
} Job;

INLINE void *take(char **from, long bytes) {
    void *taken = *from;
    *from += (bytes + 63) / 64 * 64;
    return taken;
}

INLINE Quantized quantized(char **scratch, long block, long inputs) {
    Quantized to = {.step = padded(inputs)};
    to.q = take(scratch, block * to.step * (long)sizeof(number));
    to.scale = take(scratch, block * sizeof(float));
    to.zero = take(scratch, block * sizeof(int32_t));
    return to;
}

static void one_layer(const Job *job, char *scratch, long first, long count) {
    Quantized q = quantized(&scratch, job->block, job->linear->inputs);
    quantize(&job->x, first, count, &q);
    multiply(job->linear, &q, count, job->activation, &job->out, first);
}

static void rest_of_layer(const Job *job, char *scratch, long first, long count) {
    const Linear *out = job->linear, *up = out + 1, *down = out + 2;
    const long block = job->block;
    Rows middle = {take(&scratch, 4 * block * out->outputs), out->outputs, 0};
    Rows wide = {take(&scratch, 4 * block * up->outputs), up->outputs, 0};
    Rows sum = {take(&scratch, 4 * block * down->outputs), down->outputs, 0};
    Quantized attended = quantized(&scratch, block, out->inputs);
    Quantized narrow = quantized(&scratch, block, up->inputs);
    Quantized expanded = quantized(&scratch, block, down->inputs);

    quantize(&job->x, first, count, &attended);
    multiply(out, &attended, count, NONE, &middle, 0);
    add_norm(job->norms, &middle, &job->residual, first, &middle, 0, count);
    quantize(&middle, 0, count, &narrow);
    multiply(up, &narrow, count, job->activation, &wide, 0);
    quantize(&wide, 0, count, &expanded);
    multiply(down, &expanded, count, NONE, &sum, 0);
    add_norm(job->norms + 1, &sum, &middle, 0, &job->out, first, count);
}

static void work(void *shared) {
    Job *job = shared;
    char *scratch = job->scratch + atomic_fetch_add(&job->threads, 1) * job->scratch_bytes;
    for (long item; (item = atomic_fetch_add(&job->next, 1)) * job->block < job->tokens;) {
        const long first = item * job->block, count = least(job->block, job->tokens - first);
        (job->norms ? rest_of_layer : one_layer)(job, scratch, first, count);
    }
}

/* GOMP_parallel of the OpenMP library that torch uses, so that both share one pool of threads */
typedef void Parallel(void (*body)(void *), void *shared, unsigned threads, unsigned flags);

void packhorse_int8(const Linear *linear, const Norm *norms, const void *x, const void *residual,
                    void *out, int x_bf16, int residual_bf16, int out_bf16, long x_width,
                    long out_width, int activation, void *scratch, long scratch_bytes, long tokens,
                    long block, Parallel *parallel, unsigned threads) {
    Job job = {linear,
               norms,
               {(void *)x, x_width, x_bf16},
               {(void *)residual, out_width, residual_bf16},
               {out, out_width, out_bf16},
               scratch,
               tokens,
               block,
               scratch_bytes,
               activation,
               0,
               0};
    threads > 1 ? parallel(work, &job, threads, 0) : work(&job);
}
