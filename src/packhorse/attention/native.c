/* Attention over packed sequences for CPUs, forward only. Compiled at first use by native.py.
 *
 * One work item is one head of up to CHUNK query rows of one sequence. It is told where its
 * sequence begins and ends and reads nothing else, so sequences cannot meet. Keys come in blocks of
 * KEYS with a running maximum and sum (Milakov and Gimelshein 2018; Dao et al. 2022), so scores stay
 * in the first-level cache and any length works with fixed buffers.
 *
 * Queries lie across the lanes of a vector, keys follow one another in memory: scores are computed
 * transposed, [key][query]. Hence the softmax needs no reduction across lanes and keys need no mask;
 * the price is to transpose the queries on the way in and the result on the way out.
 *
 * All operands are 32-bit words along the reduction: one float, or (`paired`) two bf16 neighbours,
 * of which VDPBF16PS multiplies and adds both. The two formats differ in nothing else. Without that
 * instruction bf16 is widened to floats while it is packed.
 */

#include <float.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define TILE 8 /* keys or columns a register tile holds, beside two vectors of queries */
#elif defined(__AVX__)
#define LANES 8
#define TILE 4
#else
#define LANES 4
#define TILE 4
#endif

#if defined(__AVX512BF16__)
#define PAIRS 1
#else
#define PAIRS 0
#endif

#define GROUP (2 * LANES) /* queries computed at once */
#define CHUNK 128         /* queries of a work item: keys are packed once for all of them */
#define KEYS 128          /* keys of a block */
#define WIDEST 256        /* largest head size */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t word __attribute__((may_alias));
typedef uint16_t bf16;

typedef struct {
    const char *q, *k, *v; /* [T, H, D]; tokens `*_step` bytes apart */
    char *out;             /* [T, H, D], contiguous */
    const int32_t *chunks; /* [items, 3]: first token and length of the sequence, first query row */
    long items, heads, width, q_step, k_step, v_step;
    float scale;           /* of the scores, times log2(e): exponentials here are powers of two */
    int is_bf16;
    atomic_long next;      /* the next work item that no thread has taken */
} Job;

typedef struct {           /* what one thread needs; rows are as long as the job's width asks */
    _Alignas(64) word q[CHUNK * WIDEST];   /* [group][word][query] */
    _Alignas(64) word k[KEYS * WIDEST];    /* [key][word] */
    _Alignas(64) word v[KEYS * WIDEST];    /* [key or pair of keys][column] */
    _Alignas(64) float s[KEYS * GROUP];    /* [key][query]: scores, then probabilities */
    _Alignas(64) float out[CHUNK * WIDEST]; /* [group][column][query] */
    _Alignas(64) float most[CHUNK], sum[CHUNK]; /* of the scores and exponentials so far */
} Scratch;

/* ---- the vector vocabulary ---- */

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec splat_word(word x) { return (vec)((ivec){0} + (int32_t)x); }

INLINE vec load(const void *from) { return *(const anywhere *)from; }

INLINE void store(void *to, vec x) { *(anywhere *)to = x; }

INLINE vec larger(vec a, vec b) { /* a NaN in b survives, and in a need not: its exponential will */
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    ivec pick = a > b;
    return (vec)((pick & (ivec)a) | (~pick & (ivec)b));
#endif
}

/* acc + a·b, where b is the same word for all queries */
INLINE vec multiply_add(vec acc, vec a, word b, int paired) {
#if PAIRS
    if (paired)
        return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)splat_word(b));
#endif
    (void)paired;
    return acc + a * (vec)splat_word(b);
}

/* 2^x for x ≤ 0, to 7.5e-8 (or 7.5e-5 where the result is rounded to bf16 anyhow): a minimax
 * polynomial for the fraction and the exponent put in by hand. NaN stays NaN, −∞ gives 0. */
INLINE vec power_of_two(vec x, int coarse) {
#if defined(__AVX512DQ__)
    vec f = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    x = larger(splat(-126.75f), x); /* the lowest exponent there is then means 0 */
    vec shifted = (x - 0.5f) + (12582912.0f + 127.0f); /* rounds; the low bits hold the exponent */
    vec f = x - (shifted - (12582912.0f + 127.0f));
#endif
    vec p;
    if (coarse)
        p = ((f * 0.078024482f + 0.226067224f) * f + 0.695833514f) * f + 0.99992522f;
    else
        p = ((((f * 0.00187757618f + 0.00898934425f) * f + 0.0558263111f) * f + 0.240153621f) * f +
             0.693153073f) * f + 0.999999925f;
#if defined(__AVX512DQ__)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return p * (vec)((ivec)shifted << 23);
#endif
}

/* ---- bf16 ---- */

INLINE word widen(bf16 x) { return (word)x << 16; }

INLINE bf16 narrow(word x) { /* to nearest, ties to even; a NaN must not become infinite */
    if ((x & 0x7fffffff) > 0x7f800000) return (x >> 16) | 0x40;
    return (x + 0x7fff + ((x >> 16) & 1)) >> 16;
}

INLINE void store_pair(word *to, vec even, vec odd) { /* each query's two neighbouring keys */
#if PAIRS
    const __m512i interleave = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(interleave, both));
#else
    (void)to, (void)even, (void)odd;
#endif
}

/* ---- transposition ---- */

/* rows[i][j] to rows[j][i] */
INLINE void transpose(vec rows[LANES]) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) for (int j = 0; j < 2; j++) {
        b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
        b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
    UNROLL for (int i = 0; i < 16; i += 8) for (int j = 0; j < 4; j++) {
        a[i + j] = _mm512_shuffle_i32x4(b[i + j], b[i + j + 4], 0x88);
        a[i + j + 4] = _mm512_shuffle_i32x4(b[i + j], b[i + j + 4], 0xdd);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        rows[i] = (vec)_mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        rows[i + 8] = (vec)_mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    }
#else
    vec columns[LANES];
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) columns[j][i] = rows[i][j];
    memcpy(rows, columns, sizeof columns);
#endif
}

/* ---- packing: what a work item reads, as words, in the order it needs them ---- */

/* words [first, first + n) of one token's head, the rest of the vector zero */
INLINE vec read_words(const char *token, long first, long n, int is_bf16, int paired) {
    word words[LANES] = {0};
    if (n >= LANES && (paired || !is_bf16)) return load(token + 4 * first);
    if (n > LANES) n = LANES;
    if (paired || !is_bf16)
        memcpy(words, token + 4 * first, 4 * n);
    else
        for (long i = 0; i < n; i++) words[i] = widen(((const bf16 *)token)[first + i]);
    return load(words);
}

INLINE void pack_queries(word *to, const char *q, long step, long rows, long words, int is_bf16,
                         int paired) {
    for (long lane = 0; lane < rows; lane += LANES)
        for (long first = 0; first < words; first += LANES) {
            vec block[LANES];
            for (long i = 0; i < LANES; i++)
                block[i] = lane + i < rows
                    ? read_words(q + (lane + i) * step, first, words - first, is_bf16, paired)
                    : (vec){0};
            transpose(block);
            word *base = to + (lane / GROUP * words + first) * GROUP + lane % GROUP;
            for (long i = 0; i < LANES && first + i < words; i++) store(base + i * GROUP, block[i]);
        }
}

/* The last key is repeated to fill a tile: that changes no maximum, and nothing else is kept. */
INLINE void pack_keys(word *to, const char *k, long step, long keys, long words, int is_bf16,
                      int paired) {
    for (long key = 0; key < (keys + TILE - 1) / TILE * TILE; key++) {
        const char *from = k + (key < keys ? key : keys - 1) * step;
        if (paired || !is_bf16)
            memcpy(to + key * words, from, 4 * words);
        else
            for (long i = 0; i < words; i++) to[key * words + i] = widen(((const bf16 *)from)[i]);
    }
}

INLINE void pack_values(word *to, const char *v, long step, long keys, long width, long columns,
                        int is_bf16, int paired) {
    for (long key = 0; key < keys; key += 1 + paired, to += columns) {
        const char *from = v + key * step;
        const bf16 *a = (const bf16 *)from, *b = (const bf16 *)(from + step);
        if (!is_bf16)
            memcpy(to, from, 4 * width);
        else if (paired && key + 1 < keys)
            for (long i = 0; i < width; i++) to[i] = a[i] | widen(b[i]);
        else
            for (long i = 0; i < width; i++) to[i] = paired ? a[i] : widen(a[i]);
        for (long i = width; i < columns; i++) to[i] = 0;
    }
}

/* ---- one block of keys for one group of queries: `vecs` vectors of them, 1 or 2 ---- */

INLINE void score(Scratch *t, const word *q, long keys, long words, vec most[2], int vecs,
                  int paired) {
    for (long key = 0; key < keys; key += TILE) {
        const word *k = t->k + key * words;
        vec acc[TILE][2] = {0};
        for (long w = 0; w < words; w++)
            UNROLL for (int i = 0; i < TILE; i++)
                UNROLL for (int j = 0; j < vecs; j++)
                    acc[i][j] = multiply_add(acc[i][j], load(q + w * GROUP + j * LANES),
                                             k[i * words + w], paired);
        UNROLL for (int i = 0; i < TILE; i++)
            UNROLL for (int j = 0; j < vecs; j++) {
                most[j] = larger(most[j], acc[i][j]);
                store(t->s + (key + i) * GROUP + j * LANES, acc[i][j]);
            }
    }
}

/* Scores to exponentials, in place; as bf16 pairs they close up to half the rows. */
INLINE vec exponentials(float *s, long keys, vec scale, vec most, int is_bf16, int paired) {
    vec sum = {0}, shift = most * scale;
    for (long key = 0; key < keys; key += 1 + paired) {
        vec even = power_of_two(load(s + key * GROUP) * scale - shift, is_bf16);
        sum += even;
        if (!paired) {
            store(s + key * GROUP, even);
            continue;
        }
        vec odd = {0};
        if (key + 1 < keys) odd = power_of_two(load(s + (key + 1) * GROUP) * scale - shift, is_bf16);
        sum += odd;
        store_pair((word *)(s + key / 2 * GROUP), even, odd);
    }
    return sum;
}

INLINE void weigh(Scratch *t, float *out, long steps, long columns, const vec fade[2], int first,
                  int vecs, int paired) {
    for (long column = 0; column < columns; column += TILE) {
        vec acc[TILE][2] = {0};
        float *to = out + column * GROUP;
        if (!first)
            UNROLL for (int i = 0; i < TILE; i++)
                UNROLL for (int j = 0; j < vecs; j++)
                    acc[i][j] = load(to + i * GROUP + j * LANES) * fade[j];
        for (long step = 0; step < steps; step++)
            UNROLL for (int i = 0; i < TILE; i++)
                UNROLL for (int j = 0; j < vecs; j++)
                    acc[i][j] = multiply_add(acc[i][j], load(t->s + step * GROUP + j * LANES),
                                             t->v[step * columns + column + i], paired);
        UNROLL for (int i = 0; i < TILE; i++)
            UNROLL for (int j = 0; j < vecs; j++) store(to + i * GROUP + j * LANES, acc[i][j]);
    }
}

INLINE void attend_block(Scratch *t, long row, long keys, long words, long columns, float scale,
                         int first, int vecs, int is_bf16, int paired) {
    vec most[2], fade[2];
    for (int j = 0; j < vecs; j++)
        most[j] = first ? splat(-FLT_MAX) : load(t->most + row + j * LANES);
    score(t, t->q + row * words, keys, words, most, vecs, paired);
    for (int j = 0; j < vecs; j++) {
        float *seen = t->most + row + j * LANES, *sum = t->sum + row + j * LANES;
        vec own = exponentials(t->s + j * LANES, keys, splat(scale), most[j], is_bf16, paired);
        fade[j] = first ? (vec){0} : power_of_two((load(seen) - most[j]) * scale, 0);
        store(sum, first ? own : load(sum) * fade[j] + own);
        store(seen, most[j]);
    }
    weigh(t, t->out + row * columns, paired ? (keys + 1) / 2 : keys, columns, fade, first, vecs,
          paired);
}

INLINE void write_rows(const Scratch *t, char *out, long step, long rows, long width, long columns,
                       int is_bf16) {
    for (long lane = 0; lane < rows; lane += LANES)
        for (long first = 0; first < width; first += LANES) {
            vec block[LANES], share = 1.0f / load(t->sum + lane);
            const float *base = t->out + (lane / GROUP * columns + first) * GROUP + lane % GROUP;
            for (long i = 0; i < LANES; i++)
                block[i] = first + i < width ? load(base + i * GROUP) * share : (vec){0};
            transpose(block);
            long some = width - first < LANES ? width - first : LANES;
            for (long i = 0; i < LANES && lane + i < rows; i++) {
                char *to = out + (lane + i) * step + first * (is_bf16 ? 2 : 4);
                if (!is_bf16) {
                    memcpy(to, &block[i], 4 * some);
                    continue;
                }
                bf16 narrowed[LANES];
#if PAIRS
                _mm256_storeu_si256((void *)narrowed, (__m256i)_mm512_cvtneps_pbh((__m512)block[i]));
#else
                for (int j = 0; j < LANES; j++) narrowed[j] = narrow(((ivec)block[i])[j]);
#endif
                memcpy(to, narrowed, 2 * some);
            }
        }
}

INLINE void attend_item(const Job *job, Scratch *t, long item, int is_bf16, int paired) {
    const int32_t *chunk = job->chunks + item / job->heads * 3;
    const long bytes = is_bf16 ? 2 : 4, head = item % job->heads * job->width * bytes;
    const long start = chunk[0], length = chunk[1], row = chunk[2];
    const long rows = length - row < CHUNK ? length - row : CHUNK;
    const long words = paired ? job->width / 2 : job->width;
    const long columns = (job->width + TILE - 1) / TILE * TILE;
    pack_queries(t->q, job->q + (start + row) * job->q_step + head, job->q_step, rows, words,
                 is_bf16, paired);
    for (long key = 0; key < length; key += KEYS) {
        const long keys = length - key < KEYS ? length - key : KEYS;
        pack_keys(t->k, job->k + (start + key) * job->k_step + head, job->k_step, keys, words,
                  is_bf16, paired);
        pack_values(t->v, job->v + (start + key) * job->v_step + head, job->v_step, keys,
                    job->width, columns, is_bf16, paired);
        for (long r = 0; r < rows; r += GROUP)
            if (rows - r > LANES)
                attend_block(t, r, keys, words, columns, job->scale, !key, 2, is_bf16, paired);
            else
                attend_block(t, r, keys, words, columns, job->scale, !key, 1, is_bf16, paired);
    }
    const long step = job->heads * job->width * bytes;
    write_rows(t, job->out + (start + row) * step + head, step, rows, job->width, columns, is_bf16);
}

static void work(void *shared) {
    Job *job = shared;
    Scratch scratch;
    for (;;) {
        long item = atomic_fetch_add(&job->next, 1);
        if (item >= job->items * job->heads) return;
        if (job->is_bf16)
            attend_item(job, &scratch, item, 1, PAIRS);
        else
            attend_item(job, &scratch, item, 0, 0);
    }
}

/* `parallel` is GOMP_parallel of the OpenMP library that torch uses: one pool of threads for both. */
typedef void Parallel(void (*body)(void *), void *shared, unsigned threads, unsigned flags);

void packhorse_attend(const void *q, const void *k, const void *v, void *out, const int32_t *chunks,
                      long items, long heads, long width, long q_step, long k_step, long v_step,
                      float scale, int is_bf16, Parallel *parallel, int threads) {
    Job job = {q, k, v, out, chunks, items, heads, width, q_step, k_step, v_step,
               scale, is_bf16, 0};
    if (threads > 1 && items * heads > 1)
        parallel(work, &job, threads, 0);
    else
        work(&job);
}
