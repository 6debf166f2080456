/* LayerNorm (Ba et al. 2016) of x + residual, forward only. freeze.py compiles this file at first
 * use: for floats, and once more with BF16=1.
 *
 * A row, which is a token, is read once and written once. In between x + residual stays in the
 * first-level cache as floats, from which the mean and then the variance are computed (two passes:
 * E[x²] − E[x]² would cancel). Only the result is rounded. One thread computes a row in a fixed
 * order, so the result does not depend on the number of threads.
 */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#include <immintrin.h>
#define AVX512 1
#define LANES 16
#else
#define LANES 8
#endif

/* freeze.py sets BLOCK. Its vectors are summed separately: the additions of a single sum would wait
 * for each other. */
#define VECTORS (BLOCK / LANES)
#define INLINE static inline __attribute__((always_inline))
#define EACH_VECTOR _Pragma("GCC unroll 16") for (int j = 0; j < VECTORS; j++)

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
#if BF16
typedef uint16_t number;
#else
typedef float number;
#endif

typedef struct {
    const number *x, *residual; /* [rows, width], contiguous as is `out` */
    const float *weight, *bias; /* [columns] */
    number *out;
    float *scratch;            /* [shares, columns] */
    long rows, width, columns; /* columns: the width rounded up to a block */
    long share;                /* rows that a thread takes at once */
    float eps;
    atomic_long next; /* the first share that no thread has taken */
} Job;

INLINE vec load(const float *from) { return *(const unaligned_vec *)from; }
INLINE void store(float *to, vec x) { *(unaligned_vec *)to = x; }

INLINE vec read(const number *from) {
#if BF16 && AVX512
    __m256i x = _mm256_loadu_si256((const void *)from);
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
#elif BF16
    halves x;
    memcpy(&x, from, sizeof x);
    return (vec)(__builtin_convertvector(x, words) << 16);
#else
    return load(from);
#endif
}

INLINE void write(number *to, vec x) {
#if BF16 && __AVX512BF16__
    _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#elif BF16 /* to nearest, ties to even; the carry must not turn a NaN into infinity or zero */
    words bits = (words)x, nan = (words)(x != x);
    bits = ((bits + 0x7fff + (bits >> 16 & 1)) & ~nan) | (nan & 0x7fc00000);
    halves rounded = __builtin_convertvector(bits >> 16, halves);
    memcpy(to, &rounded, sizeof rounded);
#else
    store(to, x);
#endif
}

INLINE float across(const vec *sums) {
    vec sum = {0};
    EACH_VECTOR sum += sums[j];
#if AVX512
    return _mm512_reduce_add_ps((__m512)sum);
#else
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    return total;
#endif
}

INLINE void add(float *to, vec *sums, const number *x, const number *residual) {
    EACH_VECTOR {
        vec sum = read(x + j * LANES) + read(residual + j * LANES);
        store(to + j * LANES, sum);
        sums[j] += sum;
    }
}

INLINE void write_block(number *to, const float *sum, const float *weight, const float *bias,
                        float mean, float scale) {
    EACH_VECTOR write(to + j * LANES, (load(sum + j * LANES) - mean) * scale *
                      load(weight + j * LANES) + load(bias + j * LANES));
}

static void add_norm(const Job *job, long row, float *sum) {
    const long width = job->width, whole = width / BLOCK * BLOCK, rest = width - whole;
    const number *x = job->x + row * width, *residual = job->residual + row * width;
    number *out = job->out + row * width, last[2][BLOCK] = {0};
    vec sums[VECTORS] = {0}, squares[VECTORS] = {0};
    for (long i = 0; i < whole; i += BLOCK) add(sum + i, sums, x + i, residual + i);
    if (rest) { /* the next row may belong to another thread: never read or write beyond this one */
        memcpy(last[0], x + whole, rest * sizeof *x);
        memcpy(last[1], residual + whole, rest * sizeof *x);
        add(sum + whole, sums, last[0], last[1]);
    }
    const float mean = across(sums) / width;
    for (long i = width; i < job->columns; i++) sum[i] = mean; /* adds nothing to the variance */
    for (long i = 0; i < job->columns; i += BLOCK) EACH_VECTOR {
        vec difference = load(sum + i + j * LANES) - mean;
        squares[j] += difference * difference;
    }
    const float scale = 1 / sqrtf(across(squares) / width + job->eps);
    const float *weight = job->weight, *bias = job->bias;
    for (long i = 0; i < whole; i += BLOCK)
        write_block(out + i, sum + i, weight + i, bias + i, mean, scale);
    if (rest) {
        write_block(last[0], sum + whole, weight + whole, bias + whole, mean, scale);
        memcpy(out + whole, last[0], rest * sizeof *out);
    }
}

static void work(void *shared) {
    Job *job = shared;
    for (long share; (share = atomic_fetch_add(&job->next, 1)) * job->share < job->rows;) {
        const long first = share * job->share, left = job->rows - first;
        for (long row = 0; row < job->share && row < left; row++)
            add_norm(job, first + row, job->scratch + share * job->columns);
    }
}

/* GOMP_parallel of the OpenMP library that torch uses, so that both share one pool of threads */
typedef void Parallel(void (*body)(void *), void *shared, unsigned threads, unsigned flags);

void packhorse_add_norm(const number *x, const number *residual, const float *weight,
                        const float *bias, number *out, float *scratch, long rows, long width,
                        long columns, float eps, Parallel *parallel, unsigned threads) {
    const long share = (rows + threads - 1) / threads;
    Job job = {x, residual, weight, bias, out, scratch, rows, width, columns, share, eps, 0};
    threads > 1 ? parallel(work, &job, threads, 0) : work(&job);
}
