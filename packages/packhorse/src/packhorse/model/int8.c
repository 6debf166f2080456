/* Linear layers whose products are int8, and all of a BERT layer that follows its attention, forward
 * only. int8.py compiles this file.
 *
 * Weights have a scale per output channel and are symmetric. An activation has a scale and a zero
 * point per token, which depend on that token alone: x ≈ scale · (q − zero), q in 0 … 255. Integer
 * sums are exact in any order, and all floating-point work is per token in a fixed order, so the
 * result for a token is the same bit by bit whatever else is in the batch.
 *
 * A thread takes a block of tokens through all steps; what is between them stays in its second-level
 * cache. VPDPBUSD multiplies four unsigned by four signed bytes and adds them to an int32 without
 * saturation. Weights lie as it reads them: [panel of 64 channels][4 inputs][channel][input].
 */

#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define VECTORS 4              /* of a panel */
#define PANEL (LANES * VECTORS)
#define ROWS 6                 /* tokens of a tile: 24 sums, 4 weights and a broadcast in registers */

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 8")
#define EACH_ROW UNROLL for (int r = 0; r < rows; r++)
#define EACH_VECTOR UNROLL for (int v = 0; v < VECTORS; v++)

enum { NONE, GELU, GELU_TANH, RELU };

/* Mirrored by int8.py. Channels from `outputs` to a multiple of PANEL have zeros. */
typedef struct {
    const int8_t *weight; /* [panels][inputs / 4, rounded up][PANEL][4] */
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
    uint8_t *q; /* [tokens, step] */
    float *scale;
    int32_t *zero;
    long step;
} Quantized;

/* A row of numbers, fp32 or bf16 */
typedef struct {
    void *at;
    long width;
    int bf16;
} Rows;

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE __mmask16 lanes(long n) { return n >= LANES ? 0xffff : (__mmask16)((1u << n) - 1); }

INLINE __m512 read(const Rows *rows, long row, long column, __mmask16 mask) {
    const long i = row * rows->width + column;
    if (!rows->bf16) return _mm512_maskz_loadu_ps(mask, (const float *)rows->at + i);
    __m256i x = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)rows->at + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

INLINE void write(const Rows *rows, long row, long column, __mmask16 mask, __m512 x) {
    const long i = row * rows->width + column;
    if (!rows->bf16) {
        _mm512_mask_storeu_ps((float *)rows->at + i, mask, x);
        return;
    }
    /* to nearest, ties to even; the carry must not turn a NaN into infinity or zero */
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    bits = _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000));
    __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
    _mm256_mask_storeu_epi16((uint16_t *)rows->at + i, mask, halves);
}

/* ---- quantization ---- */

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

INLINE __mmask16 lanes_of(long left, int j) { return left > j * LANES ? lanes(left - j * LANES) : 0; }

typedef struct {
    __m512 low[4], high[4];
    __m512i size[4]; /* the largest magnitude, as an integer, which sees NaN and infinity */
} Range;

INLINE void widen(Range *range, const Rows *from, long row, long i, long left) {
    EACH_IN_BLOCK {
        __m512 x = read(from, row, i + j * LANES, lanes_of(left, j));
        __m512i size = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
        range->low[j] = _mm512_min_ps(range->low[j], x);
        range->high[j] = _mm512_max_ps(range->high[j], x);
        range->size[j] = _mm512_max_epu32(range->size[j], size);
    }
}

INLINE void round_block(const Rows *from, long row, long i, long left, float steps, int32_t zero,
                        uint8_t *q, long room) {
    /* Packing works within quarters of a register, so quarters end up in this order. */
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m512i n[4];
    EACH_IN_BLOCK {
        __m512 x = read(from, row, i + j * LANES, lanes_of(left, j));
        x = _mm512_mul_ps(x, _mm512_set1_ps(steps));
        n[j] = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(zero));
    }
    __m512i bytes = _mm512_packus_epi16(_mm512_packs_epi32(n[0], n[1]),
                                        _mm512_packs_epi32(n[2], n[3]));
    bytes = _mm512_permutexvar_epi32(order, bytes);
    if (left == BLOCK) _mm512_storeu_si512(q + i, bytes);
    else _mm512_mask_storeu_epi8(q + i, ~0ull >> (BLOCK - room), bytes); /* room: 1 … 64 */
}

INLINE void quantize_rows(const Rows *from, long first, long count, const Quantized *to) {
    const long width = from->width;
    for (long row = 0; row < count; row++) {
        Range range = {0};
        EACH_BLOCK(width, i, left, widen(&range, from, first + row, i, left));
        __m512 low = _mm512_min_ps(range.low[0], range.low[1]);
        __m512 high = _mm512_max_ps(range.high[0], range.high[1]);
        __m512i size = _mm512_max_epu32(range.size[0], range.size[1]);
        low = _mm512_min_ps(low, _mm512_min_ps(range.low[2], range.low[3]));
        high = _mm512_max_ps(high, _mm512_max_ps(range.high[2], range.high[3]));
        size = _mm512_max_epu32(size, _mm512_max_epu32(range.size[2], range.size[3]));
        const float bottom = _mm512_reduce_min_ps(low);
        const float scale = (_mm512_reduce_max_ps(high) - bottom) / 255;
        const float steps = scale > 1e-30f ? 1 / scale : 0;
        const int32_t zero = (int32_t)rintf(-bottom * steps);
        to->scale[row] = _mm512_reduce_max_epu32(size) < 0x7f800000 ? scale : NAN;
        to->zero[row] = zero;
        uint8_t *q = to->q + row * to->step;
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
INLINE void tile(const uint8_t *x, long step, const int8_t *weight, int32_t *to, const int rows) {
    __m512i sums[ROWS][VECTORS];
    EACH_ROW EACH_VECTOR sums[r][v] = _mm512_setzero_si512();
    for (long i = 0; i < step; i += 4, weight += 4 * PANEL) {
        __m512i w[VECTORS];
        EACH_VECTOR w[v] = _mm512_loadu_si512(weight + v * 64);
        EACH_ROW {
            int32_t four;
            memcpy(&four, x + r * step + i, 4);
            __m512i all = _mm512_set1_epi32(four);
            EACH_VECTOR sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], all, w[v]);
        }
    }
    EACH_ROW EACH_VECTOR _mm512_storeu_si512(to + r * PANEL + v * LANES, sums[r][v]);
}

APART void sum_tile(const uint8_t *x, long step, const int8_t *weight, int32_t *to, long rows) {
    switch (rows) {
    case 1: tile(x, step, weight, to, 1); return;
    case 2: tile(x, step, weight, to, 2); return;
    case 3: tile(x, step, weight, to, 3); return;
    case 4: tile(x, step, weight, to, 4); return;
    case 5: tile(x, step, weight, to, 5); return;
    default: tile(x, step, weight, to, ROWS);
    }
}

/* 2^x for x ≤ 0, to 7.5e-8 */
INLINE __m512 power_of_two(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const float terms[] = {0.00898934425f, 0.0558263111f, 0.240153621f, 0.693153073f, 0.999999925f};
    __m512 p = _mm512_set1_ps(0.00187757618f);
    UNROLL for (int i = 0; i < 5; i++) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(terms[i]));
    return _mm512_scalef_ps(p, x);
}

/* x · Φ(x); the tail of the normal distribution by Abramowitz and Stegun 7.1.26, to 1.5e-7 */
INLINE __m512 gelu(__m512 x) {
    const float terms[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    __m512 size = _mm512_abs_ps(x), one = _mm512_set1_ps(1);
    /* p / √2 */
    __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(size, _mm512_set1_ps(0.23164190f), one));
    __m512 p = _mm512_set1_ps(1.061405429f);
    UNROLL for (int i = 0; i < 4; i++) p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(terms[i]));
    /* exp(−x²/2) */
    __m512 fall = power_of_two(_mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(-0.72134752f)));
    __m512 tail = _mm512_mul_ps(_mm512_mul_ps(p, t), _mm512_mul_ps(fall, _mm512_set1_ps(0.5f)));
    /* x − x·tail above 0, x·tail below: both are max(x, 0) − |x|·tail */
    return _mm512_fnmadd_ps(size, tail, _mm512_max_ps(_mm512_setzero_ps(), x));
}

/* x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2 is x / (1 + exp(−2 …)) */
INLINE __m512 gelu_tanh(__m512 x) {
    __m512 size = _mm512_abs_ps(x), one = _mm512_set1_ps(1);
    __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(size, size), _mm512_set1_ps(0.044715f), one);
    /* −2 √(2/π) log2 e */
    __m512 fall = power_of_two(_mm512_mul_ps(_mm512_mul_ps(size, cubic), _mm512_set1_ps(-2.3022082f)));
    __m512 tail = _mm512_div_ps(fall, _mm512_add_ps(fall, one));
    return _mm512_fnmadd_ps(size, tail, _mm512_max_ps(_mm512_setzero_ps(), x));
}

INLINE __m512 activate(__m512 x, int activation) {
    switch (activation) {
    case GELU: return gelu(x);
    case GELU_TANH: return gelu_tanh(x);
    case RELU: return _mm512_max_ps(_mm512_setzero_ps(), x); /* the second of two if one is NaN */
    default: return x;
    }
}

INLINE void write_vectors(const Linear *linear, const Quantized *x, long row, long rows, long panel,
                          const int32_t *sums, const Rows *out, long first, const int activation) {
    for (int v = 0; v < VECTORS; v++) {
        const long column = panel * PANEL + v * LANES;
        if (column >= linear->outputs) return;
        const __mmask16 mask = lanes(linear->outputs - column);
        const __m512i total = _mm512_loadu_si512(linear->sums + column);
        const __m512 scale = _mm512_loadu_ps(linear->scale + column);
        const __m512 bias = _mm512_loadu_ps(linear->bias + column);
        for (long r = 0; r < rows; r++) {
            __m512i zero = _mm512_mullo_epi32(_mm512_set1_epi32(x->zero[row + r]), total);
            __m512i sum = _mm512_loadu_si512(sums + r * PANEL + v * LANES);
            __m512 y = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, zero));
            y = _mm512_mul_ps(y, _mm512_set1_ps(x->scale[row + r]));
            y = activate(_mm512_fmadd_ps(y, scale, bias), activation);
            write(out, first + row + r, column, mask, y);
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

/* ---- LayerNorm of x + residual, two passes as in add_norm.c ---- */

INLINE __m512 total(const __m512 *sums) {
    __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
    return _mm512_set1_ps(_mm512_reduce_add_ps(sum));
}

INLINE void add(float *x, const Rows *residual, long row, long i, long left, __m512 *sums) {
    EACH_IN_BLOCK {
        const __mmask16 mask = lanes_of(left, j);
        float *at = x + i + j * LANES;
        __m512 y = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at),
                                 read(residual, row, i + j * LANES, mask));
        _mm512_mask_storeu_ps(at, mask, y);
        sums[j] = _mm512_add_ps(sums[j], y);
    }
}

INLINE void deviate(const float *x, __m512 mean, long i, long left, __m512 *squares) {
    EACH_IN_BLOCK {
        const __mmask16 mask = lanes_of(left, j);
        __m512 y = _mm512_maskz_loadu_ps(mask, x + i + j * LANES);
        y = _mm512_maskz_sub_ps(mask, y, mean);
        squares[j] = _mm512_fmadd_ps(y, y, squares[j]);
    }
}

INLINE void scale_block(const Norm *norm, const float *x, __m512 mean, __m512 scale, const Rows *out,
                        long row, long i, long left) {
    EACH_IN_BLOCK {
        const __mmask16 mask = lanes_of(left, j);
        const long column = i + j * LANES;
        __m512 y = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, x + column), mean);
        y = _mm512_fmadd_ps(_mm512_mul_ps(y, scale),
                            _mm512_maskz_loadu_ps(mask, norm->weight + column),
                            _mm512_maskz_loadu_ps(mask, norm->bias + column));
        write(out, row, column, mask, y);
    }
}

/* `x` is fp32 and overwritten. */
APART void add_norm(const Norm *norm, const Rows *x, const Rows *residual, long first,
                    const Rows *out, long out_first, long count) {
    const long width = norm->width;
    for (long row = 0; row < count; row++) {
        float *sum = (float *)x->at + row * width;
        __m512 sums[4] = {0}, squares[4] = {0};
        EACH_BLOCK(width, i, left, add(sum, residual, first + row, i, left, sums));
        const __m512 mean = _mm512_div_ps(total(sums), _mm512_set1_ps(width));
        EACH_BLOCK(width, i, left, deviate(sum, mean, i, left, squares));
        __m512 variance = _mm512_div_ps(total(squares), _mm512_set1_ps(width));
        variance = _mm512_add_ps(variance, _mm512_set1_ps(norm->eps));
        const __m512 scale = _mm512_div_ps(_mm512_set1_ps(1), _mm512_sqrt_ps(variance));
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
    Quantized to = {.step = (inputs + 3) / 4 * 4};
    to.q = take(scratch, block * to.step);
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
