/* Linear layers with their activation for CPUs, fp32, forward only: out = activation(x Wᵀ + b).
 * freeze.py compiles this file at first use.
 *
 * The method is that of GotoBLAS (Goto and van de Geijn 2008). A tile of ROWS rows and PANEL columns
 * is summed in registers. The weight is stored so that a tile reads it in order: panels of PANEL
 * columns, [panel][input][column]. DEPTH inputs of a panel stay in the first-level cache while a
 * block of rows passes, and the block in the second-level cache while the panels pass. Rows are read
 * where they are.
 *
 * A row's sums do not depend on the number of rows or threads, or on its place: every number is
 * added up in the same order, DEPTH products at a time, whatever tile it is in.
 */

#include <stdatomic.h>

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#define AVX512 1
#define LANES 16
#define ROWS 12 /* × 2 vectors of sums, of 32 registers */
#else
#define LANES 8
#define ROWS 6 /* × 2 vectors of sums, of 16 registers */
#endif

#define DEPTH 384 /* inputs, at most; those of a layer are divided evenly */
#define BLOCK 144 /* rows; a multiple of ROWS */
#define PANEL 32  /* columns that the weight is padded to; freeze.py knows it */
#define TILE (2 * LANES)

#define EACH_IN_TILE UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 2; j++)

#include "vectors.h"

typedef struct {
    const float *x;            /* [rows, inputs], contiguous as is `out` */
    const float *weight;       /* [columns / TILE][inputs][TILE], columns padded to PANEL */
    const float *bias;         /* [columns], padded likewise */
    float *out;                /* [rows, columns] */
    long rows, inputs, columns;
    long depth;                /* inputs that are summed at once */
    long groups, group;        /* groups of columns, and how many each has; a multiple of TILE */
    enum activation activation;
    atomic_long next;          /* the first work item that no thread has taken */
} Job;

APART void activate_rows(float *out, long step, long rows, enum activation activation) {
    for (long row = 0; row < rows; row++, out += step)
        for (int j = 0; j < TILE; j += LANES) store(out + j, activate(load(out + j), activation));
}

INLINE void sum_tile(const float *x, long x_step, const float *weight, const float *bias,
                     float *out, long step, long depth, const int rows) {
    vec sums[ROWS][2] = {0};
    for (long k = 0; k < depth; k++, x++, weight += TILE) {
        const vec w[2] = {load(weight), load(weight + LANES)};
        UNROLL for (int i = 0; i < rows; i++) {
            const vec a = splat(x[i * x_step]);
            sums[i][0] += a * w[0];
            sums[i][1] += a * w[1];
        }
    }
    EACH_IN_TILE {
        float *to = out + i * step + j * LANES;
        store(to, sums[i][j] + load(bias ? bias + j * LANES : to)); /* a bias: the first inputs */
    }
}

#define CASE(n) case n: sum_tile(x, x_step, weight, bias, out, step, depth, n); break;
INLINE void sum_rows(const float *x, long x_step, const float *weight, const float *bias,
                     float *out, long step, long depth, long rows) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if AVX512
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

/* The last rows of a block are divided evenly: the sums of few rows wait for each other. */
INLINE long tile_rows(long left) {
    return left >= 2 * ROWS ? ROWS : left > ROWS ? (left + 1) / 2 : left;
}

APART void compute_tile(const Job *job, float *out, long step, long row, long rows, long column,
                        long first) {
    const long depth = least(job->inputs - first, job->depth);
    sum_rows(job->x + row * job->inputs + first, job->inputs,
             job->weight + column * job->inputs + first * TILE, first ? NULL : job->bias + column,
             out, step, depth, rows);
    if (job->activation != NONE && first + depth == job->inputs)
        activate_rows(out, step, rows, job->activation);
}

/* The last columns, fewer than a tile: it is computed aside, and never written beyond them. */
APART void compute_rest(const Job *job, long row, long rows, long column) {
    float aside[ROWS * TILE];
    const long columns = job->columns - column;
    for (long first = 0; first < job->inputs; first += job->depth)
        compute_tile(job, aside, TILE, row, rows, column, first);
    for (long i = 0; i < rows; i++)
        memcpy(job->out + (row + i) * job->columns + column, aside + i * TILE,
               columns * sizeof *aside);
}

static void compute(const Job *job, long item) {
    const long begin = item / job->groups * BLOCK, end = least(begin + BLOCK, job->rows);
    const long left = item % job->groups * job->group;
    const long right = least(left + job->group, job->columns);
    const long whole = left + (right - left) / TILE * TILE;
    for (long first = 0; first < job->inputs; first += job->depth)
        for (long column = left; column < whole; column += TILE)
            for (long row = begin, rows; row < end; row += rows) {
                rows = tile_rows(end - row);
                compute_tile(job, job->out + row * job->columns + column, job->columns, row, rows,
                             column, first);
            }
    if (whole == right) return;
    for (long row = begin, rows; row < end; row += rows) {
        rows = tile_rows(end - row);
        compute_rest(job, row, rows, whole);
    }
}

static void work(void *shared) {
    Job *job = shared;
    const long items = (job->rows + BLOCK - 1) / BLOCK * job->groups;
    for (long item; (item = atomic_fetch_add(&job->next, 1)) < items;) compute(job, item);
}

/* Reorder a weight [columns, inputs] as `Job.weight` needs it; `to` is zero beforehand. */
void packhorse_pack_weight(const float *weight, float *to, long inputs, long columns) {
    for (long column = 0; column < columns; column++)
        for (long k = 0; k < inputs; k++)
            to[(column / TILE * inputs + k) * TILE + column % TILE] = weight[column * inputs + k];
}

/* GOMP_parallel of the OpenMP library that torch uses, so that both share one pool of threads */
typedef void Parallel(void (*body)(void *), void *shared, unsigned threads, unsigned flags);

void packhorse_product(const float *x, const float *weight, const float *bias, float *out,
                       long rows, long inputs, long columns, int activation, Parallel *parallel,
                       unsigned threads) {
    const long parts = (inputs + DEPTH - 1) / DEPTH, blocks = (rows + BLOCK - 1) / BLOCK;
    const long tiles = (columns + TILE - 1) / TILE;
    /* Several items per thread, so that all end together: of few rows, groups of columns. */
    const long wanted = threads > 1 ? (4 * threads + blocks - 1) / blocks : 1;
    const long group = (tiles + wanted - 1) / wanted * TILE;
    Job job = {x, weight, bias, out, rows, inputs, columns, (inputs + parts - 1) / parts,
               (columns + group - 1) / group, group, activation, 0};
    threads > 1 ? parallel(work, &job, threads, 0) : work(&job);
}
