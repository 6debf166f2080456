/* Attention over packed sequences for CPUs, forward only. native.py compiles this file at first
 * use: for floats, and where the CPU multiplies bf16, once more with BF16=1.
 *
 * A work item is one head of up to CHUNK query rows of one sequence. It gets the bounds of its
 * sequence and reads nothing beyond, so sequences cannot mix. Keys are processed in blocks, with a
 * running maximum and sum (online softmax, Milakov and Gimelshein 2018): scores stay in the
 * first-level cache, and fixed buffers serve for any length.
 *
 * Queries lie across the lanes of a vector and keys one after another in memory, so scores are
 * computed transposed, [key][query]. The softmax then needs no reduction across lanes, and keys
 * need no mask; the cost is to transpose queries on the way in and results on the way out.
 *
 * Products work on 32-bit words along the reduction: a float, or a pair of adjacent bf16 numbers
 * that VDPBF16PS multiplies and adds at once. Apart from packing, the two are the same code.
 */

#include <float.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#include <immintrin.h>
#define AVX512 1
#define LANES 16
#define TILE 8 /* keys or columns in a register tile, beside so many vectors of queries: */
#define VECS 2
#else
#if defined(__AVX2__)
#include <immintrin.h>
#define AVX2 1
#endif
#define LANES 8
#define TILE 4
#define VECS 3 /* twelve sums: with fewer, additions wait for each other */
#endif

/* native.py sets CHUNK, and WIDEST, the largest head width it accepts */
#define KEYS 128             /* keys per block */
#define GROUP (VECS * LANES) /* queries computed at once, in up to VECS vectors */
#define ROOM ((CHUNK + GROUP - 1) / GROUP * GROUP)
#define PER_WORD (1 + BF16) /* numbers in a word */

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline)) /* inlined, hot loops would compete for registers */
#define UNROLL _Pragma("GCC unroll 16")
#define EACH_IN_TILE UNROLL for (int i = 0; i < TILE; i++) UNROLL for (int j = 0; j < vecs; j++)

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t word __attribute__((may_alias));
#if BF16
typedef uint16_t number;
#else
typedef float number;
#endif

typedef struct {
    const number *q, *k, *v; /* [T, H, D], tokens `*_step` numbers apart */
    number *out;             /* [T, H, D], contiguous */
    const int32_t *chunks;   /* [items, 3]: first token and length of a sequence, first query row */
    const float *table;      /* NULL, or the bias by distance: heads are `t_step` apart; distance 0
                                is at `longest` - 1, and keys before the query follow */
    long items, heads, width, q_step, k_step, v_step, t_step;
    long longest;            /* tokens of the longest sequence */
    long before, after;      /* tokens that a query sees before and after itself */
    float scale;             /* of scores, times log2 e, because exponentials are powers of two */
    float unit;              /* of the table, in units of scores before they are scaled */
    atomic_long next;        /* the first work item that no thread has taken */
} Job;

typedef struct { /* one per thread; rows are packed as tightly as the head width allows */
    long width, words, columns; /* of a head: numbers; words; numbers rounded up to a tile */
    float scale, unit;
    _Alignas(64) word q[ROOM * WIDEST];         /* [group][word][query] */
    _Alignas(64) word k[KEYS * WIDEST + LANES]; /* [key][word] */
    _Alignas(64) word v[KEYS * WIDEST + LANES]; /* [key or pair of keys][column] */
    _Alignas(64) word s[KEYS * GROUP];          /* [key][query]: scores, then exponentials */
    _Alignas(64) float out[ROOM * WIDEST];      /* [group][column][query] */
    _Alignas(64) float most[ROOM], sum[ROOM];   /* of scores and exponentials so far */
} Scratch;

INLINE long least(long a, long b) { return a < b ? a : b; }

/* ---- vectors ---- */

INLINE vec load(const void *from) { return *(const unaligned_vec *)from; }
INLINE void store(void *to, vec x) { *(unaligned_vec *)to = x; }
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec splat_word(word x) { return (vec)((ivec){0} + (int32_t)x); }

INLINE vec larger(vec a, vec b) { /* a NaN in `a` may be lost, one in `b` never is */
#if AVX512
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif AVX2
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    ivec first = a > b;
    return (vec)((first & (ivec)a) | (~first & (ivec)b));
#endif
}

INLINE vec multiply_add(vec acc, vec a, word b) { /* b is the same for every query */
#if BF16
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)splat_word(b));
#else
    return acc + a * splat_word(b);
#endif
}

/* 2^x for x ≤ 0: a minimax polynomial for the fraction, to 7.5e-8 or, where the result becomes a
 * bf16, 7.5e-5; then the exponent. NaN stays NaN, −∞ gives 0. */
INLINE vec power_of_two(vec x) {
#if AVX512
    vec f = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    const float magic = 12582912.0f + 127.0f; /* 1.5 · 2^23: adding it rounds to an integer, and
                                                 leaves the biased exponent in the low bits */
    x = larger(splat(-126.75f), x);           /* there the biased exponent is 0, and so is 2^x */
    vec shifted = (x - 0.5f) + magic, f = x - (shifted - magic);
#endif
#if BF16
    vec p = ((f * 0.078024482f + 0.226067224f) * f + 0.695833514f) * f + 0.99992522f;
#else
    vec p = f * 0.00187757618f + 0.00898934425f;
    p = (((p * f + 0.0558263111f) * f + 0.240153621f) * f + 0.693153073f) * f + 0.999999925f;
#endif
#if AVX512
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return p * (vec)((ivec)shifted << 23);
#endif
}

INLINE void transpose(vec rows[LANES]) {
#if AVX512
    __m512i a[16], b[16]; /* lanes move to their place within pairs of rows, then 4, 8, 16 */
    UNROLL for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 2) {
        int from = (i & ~3) + (i >> 1 & 1);
        b[i] = _mm512_unpacklo_epi64(a[from], a[from + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[from], a[from + 2]);
    }
    UNROLL for (int i = 0; i < 16; i++)
        a[i] = i & 4 ? _mm512_shuffle_i32x4(b[i - 4], b[i], 0xdd)
                     : _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    UNROLL for (int i = 0; i < 16; i++)
        rows[i] = (vec)(i & 8 ? _mm512_shuffle_i32x4(a[i - 8], a[i], 0xdd)
                              : _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88));
#elif AVX2
    __m256 a[8], b[8]; /* as above: within pairs of rows, then 4, then 8 */
    UNROLL for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 2) {
        int from = (i & ~3) + (i >> 1 & 1);
        b[i] = _mm256_shuffle_ps(a[from], a[from + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[from], a[from + 2], 0xee);
    }
    UNROLL for (int i = 0; i < 8; i++)
        rows[i] = (vec)(i & 4 ? _mm256_permute2f128_ps(b[i - 4], b[i], 0x31)
                              : _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
#else
    vec columns[LANES];
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) columns[j][i] = rows[i][j];
    memcpy(rows, columns, sizeof columns);
#endif
}

/* Words w, w + 1 … of a head of `words` words, then zeros; reads nothing beyond the head. */
INLINE vec read_words(const number *head, long w, long words) {
    word some[LANES] = {0};
    if (words - w >= LANES) return load(head + w * PER_WORD);
    memcpy(some, head + w * PER_WORD, 4 * (words - w));
    return load(some);
}

INLINE void write_numbers(number *to, vec x, long n) {
    number row[LANES];
#if BF16
    _mm256_storeu_si256((void *)row, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    store(row, x);
#endif
    n >= LANES ? memcpy(to, row, sizeof row) : memcpy(to, row, n * sizeof *row);
}

/* ---- packing: the inputs of a work item, in the order in which it reads them ---- */

APART void pack_queries(Scratch *t, const number *q, long step, long rows) {
    for (long row = 0; row < rows; row += LANES)
        for (long w = 0; w < t->words; w += LANES) {
            vec block[LANES] = {0};
            UNROLL for (long i = 0; i < LANES; i++)
                if (i < rows - row) block[i] = read_words(q + (row + i) * step, w, t->words);
            transpose(block);
            word *to = t->q + (row / GROUP * t->words + w) * GROUP + row % GROUP;
            UNROLL for (long i = 0; i < LANES; i++)
                if (i < t->words - w) store(to + i * GROUP, block[i]);
        }
}

INLINE void pack_row(word *to, const number *head, long words) {
    for (long w = 0; w < words; w += LANES) /* the overrun is overwritten by the next row */
        store(to + w, read_words(head, w, words));
}

/* The last key is repeated to fill a tile: that changes no maximum, and its scores are ignored. */
APART void pack_keys(Scratch *t, const number *k, long step, long keys) {
    for (long key = 0; key % TILE || key < keys; key++)
        pack_row(t->k + key * t->words, k + least(key, keys - 1) * step, t->words);
}

/* Columns from `width` on hold stale data: they are computed but never written out. */
APART void pack_values(Scratch *t, const number *v, long step, long keys) {
    const long width = t->width;
    word *restrict to = t->v;
    for (long key = 0; key < keys; key += PER_WORD, v += PER_WORD * step, to += t->columns) {
#if BF16
        const number *odd = v + step;
        if (key + 1 < keys)
            for (long i = 0; i < width; i++) to[i] = v[i] | (word)odd[i] << 16;
        else
            for (long i = 0; i < width; i++) to[i] = v[i];
#else
        pack_row(to, v, width);
#endif
    }
}

/* ---- a block of keys for a group of queries ---- */

INLINE void score_tile(Scratch *t, const word *q, long key, vec *most, const int vecs) {
    const long words = t->words;
    vec acc[TILE][VECS] = {0};
    for (long w = 0; w < words; w++)
        EACH_IN_TILE acc[i][j] = multiply_add(acc[i][j], load(q + w * GROUP + j * LANES),
                                              t->k[(key + i) * words + w]);
    EACH_IN_TILE most[j] = larger(most[j], acc[i][j]);
    EACH_IN_TILE store(t->s + (key + i) * GROUP + j * LANES, acc[i][j]);
}

APART void score(Scratch *t, const word *q, long keys, vec *most, int vecs) {
    for (long key = 0; key < keys; key += TILE)
        switch (vecs) {
            case 1: score_tile(t, q, key, most, 1); break;
            case 2: score_tile(t, q, key, most, 2); break;
            default: score_tile(t, q, key, most, VECS);
        }
}

/* Add the bias by distance to the scores; `table` points at first query minus first key. */
APART void gain(Scratch *t, const float *table, long keys, vec *most, int vecs) {
    for (long key = 0; key < keys; key++, table--)
        for (int j = 0; j < vecs; j++) {
            word *at = t->s + key * GROUP + j * LANES;
            vec x = load(at) + load(table + j * LANES) * t->unit;
            most[j] = larger(most[j], x);
            store(at, x);
        }
}

/* Turn scores into exponentials, in place; bf16 pairs take half the rows. Returns their sum, which
 * is NaN if a score is, even if the maximum lost the NaN. */
APART vec exponentials(word *s, long keys, vec most, float scale) {
    vec sum = {0};
    for (long key = 0; key < keys; key += PER_WORD) {
        vec p = power_of_two((load(s + key * GROUP) - most) * scale);
        sum += p;
#if BF16
        const __m512i interleave = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
            23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        vec odd = {0};
        if (key + 1 < keys) odd = power_of_two((load(s + (key + 1) * GROUP) - most) * scale);
        sum += odd;
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)p);
        p = (vec)_mm512_permutexvar_epi16(interleave, both);
#endif
        store(s + key / PER_WORD * GROUP, p);
    }
    return sum;
}

INLINE void weigh_tile(Scratch *t, float *out, long column, long steps, const vec *fade,
                       const int vecs) {
    const long columns = t->columns;
    vec acc[TILE][VECS] = {0};
    if (fade) EACH_IN_TILE acc[i][j] = load(out + i * GROUP + j * LANES) * fade[j];
    for (long step = 0; step < steps; step++)
        EACH_IN_TILE acc[i][j] = multiply_add(acc[i][j], load(t->s + step * GROUP + j * LANES),
                                              t->v[step * columns + column + i]);
    EACH_IN_TILE store(out + i * GROUP + j * LANES, acc[i][j]);
}

APART void weigh(Scratch *t, float *out, long keys, const vec *fade, int vecs) {
    const long steps = (keys + PER_WORD - 1) / PER_WORD;
    for (long column = 0; column < t->columns; column += TILE, out += TILE * GROUP)
        switch (vecs) {
            case 1: weigh_tile(t, out, column, steps, fade, 1); break;
            case 2: weigh_tile(t, out, column, steps, fade, 2); break;
            default: weigh_tile(t, out, column, steps, fade, VECS);
        }
}

static void attend_block(Scratch *t, const float *table, long row, long keys, int vecs, int first) {
    vec most[VECS], fade[VECS], bare[VECS];
    for (int j = 0; j < vecs; j++) {
        bare[j] = splat(-FLT_MAX);
        most[j] = first ? splat(-FLT_MAX) : load(t->most + row + j * LANES);
    }
    score(t, t->q + row * t->words, keys, table ? bare : most, vecs);
    if (table) gain(t, table, keys, most, vecs);
    for (int j = 0; j < vecs; j++) {
        float *before = t->most + row + j * LANES, *sum = t->sum + row + j * LANES;
        vec own = exponentials(t->s + j * LANES, keys, most[j], t->scale);
        fade[j] = first ? splat(0) : power_of_two((load(before) - most[j]) * t->scale);
        store(sum, first ? own : load(sum) * fade[j] + own);
        store(before, most[j]);
    }
    weigh(t, t->out + row * t->columns, keys, first ? NULL : fade, vecs);
}

APART void write_rows(const Scratch *t, number *to, long step, long rows) {
    for (long row = 0; row < rows; row += LANES)
        for (long column = 0; column < t->width; column += LANES) {
            vec block[LANES] = {0}, share = 1.0f / load(t->sum + row);
            const float *from = t->out + (row / GROUP * t->columns + column) * GROUP + row % GROUP;
            UNROLL for (long i = 0; i < LANES; i++)
                if (i < t->width - column) block[i] = load(from + i * GROUP) * share;
            transpose(block);
            UNROLL for (long i = 0; i < LANES; i++)
                if (i < rows - row)
                    write_numbers(to + (row + i) * step + column, block[i], t->width - column);
        }
}

/* ---- work items ---- */

static void attend(const Job *job, Scratch *t, long item) {
    const int32_t *chunk = job->chunks + item / job->heads * 3;
    const long start = chunk[0], length = chunk[1], token = start + chunk[2];
    const long rows = least(length - chunk[2], CHUNK);
    const long head = item % job->heads * job->width, out_step = job->heads * job->width;
    const long nearest = chunk[2] > job->before ? chunk[2] - job->before : 0;
    const long end = least(length, chunk[2] + rows + job->after);
    const float *table = NULL;
    if (job->table) table = job->table + item % job->heads * job->t_step + job->longest - 1;
    pack_queries(t, job->q + token * job->q_step + head, job->q_step, rows);
    for (long key = nearest; key < end; key += KEYS) {
        const long keys = least(end - key, KEYS);
        pack_keys(t, job->k + (start + key) * job->k_step + head, job->k_step, keys);
        pack_values(t, job->v + (start + key) * job->v_step + head, job->v_step, keys);
        for (long row = 0; row < rows; row += GROUP)
            attend_block(t, table ? table + chunk[2] + row - key : NULL, row, keys,
                         least((rows - row + LANES - 1) / LANES, VECS), key == nearest);
    }
    write_rows(t, job->out + token * out_step + head, out_step, rows);
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static int has_key;

static void make_key(void) { has_key = !pthread_key_create(&key, free); }

/* Half a megabyte, for which a thread's stack may be too small. A thread keeps it until it ends,
 * because a new allocation per call may cost page faults each time. NULL: out of memory. */
static Scratch *own_scratch(void) {
    pthread_once(&once, make_key);
    if (!has_key) return NULL;
    void *own = pthread_getspecific(key);
    if (own) return own;
    if (posix_memalign(&own, 64, sizeof(Scratch))) return NULL;
    if (pthread_setspecific(key, own)) {
        free(own);
        return NULL;
    }
    return own;
}

static void work(void *shared) {
    Job *job = shared;
    Scratch *t = own_scratch();
    if (!t) return; /* the other threads do the work */
    t->width = job->width;
    t->words = job->width / PER_WORD;
    t->columns = (job->width + TILE - 1) / TILE * TILE;
    t->scale = job->scale;
    t->unit = job->unit;
    for (long item; (item = atomic_fetch_add(&job->next, 1)) < job->items * job->heads;)
        attend(job, t, item);
}

/* GOMP_parallel of the OpenMP library that torch uses, so that both share one pool of threads */
typedef void Parallel(void (*body)(void *), void *shared, unsigned threads, unsigned flags);

/* Returns 0, or 1 if no thread had memory: then nothing was computed. */
int packhorse_attend(const number *q, const number *k, const number *v, number *out,
                     const int32_t *chunks, const float *table, long items, long heads, long width,
                     long q_step, long k_step, long v_step, long t_step, long longest, long before,
                     long after, float scale, float unit, Parallel *parallel, unsigned threads) {
    Job job = {q,      k,      v,      out,     chunks, table, items, heads, width, q_step,
               k_step, v_step, t_step, longest, before, after, scale, unit,  0};
    parallel(work, &job, threads, 0);
    return job.next < items * heads;
}
