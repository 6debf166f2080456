/* Small convolutions for CPUs: stride 1, no padding, one group, floats. convolve.py compiles this
 * file for each shape: N pictures of C channels, H x W, to K channels by R x S windows.
 *
 * Channels lie across the lanes of a vector, in blocks of up to 16, and one value of the picture
 * goes to all of them; a row of places is computed at once, so that a weight is loaded once for it.
 * One thread: what is this small is done before a second one has woken up.
 */

#define P (H - R + 1)
#define Q (W - S + 1)
#define SOME(of) ((of) <= 8 ? 8 : 16) /* lanes of a block of `of` channels */
#define BLOCKS(of) (((of) + SOME(of) - 1) / SOME(of))
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define ROW LEAST(Q, 13) /* places at once */

typedef float kvec __attribute__((vector_size(4 * SOME(K))));
typedef float cvec __attribute__((vector_size(4 * SOME(C))));

/* w: [K, C, R, S]; scratch: [C, R, S] of kvec; out: [N, K, P, Q] */
void packhorse_convolve(const float *x, const float *w, const float *bias, float *out,
                        float *scratch)
{
    kvec *turned = (kvec *)scratch;
    for (int block = 0; block < BLOCKS(K); block++) {
        const int first = block * SOME(K), many = LEAST(K - first, SOME(K));
        kvec begin = {0};
        for (int k = 0; k < many; k++) begin[k] = bias ? bias[first + k] : 0.0f;
        for (int i = 0; i < C * R * S; i++) {
            kvec one = {0};
            for (int k = 0; k < many; k++) one[k] = w[(first + k) * C * R * S + i];
            turned[i] = one;
        }
        for (int n = 0; n < N; n++)
            for (int p = 0; p < P; p++)
                for (int at = 0; at < Q; at += ROW) {
                    const int q = LEAST(at, Q - ROW); /* the last ones overlap */
                    kvec sums[ROW];
                    for (int j = 0; j < ROW; j++) sums[j] = begin;
                    for (int c = 0; c < C; c++)
                        for (int r = 0; r < R; r++) {
                            const float *row = x + ((n * C + c) * H + p + r) * W + q;
                            for (int s = 0; s < S; s++) {
                                const kvec weight = turned[(c * R + r) * S + s];
                                for (int j = 0; j < ROW; j++) sums[j] += row[s + j] * weight;
                            }
                        }
                    for (int k = 0; k < many; k++)
                        for (int j = 0; j < ROW; j++)
                            out[((n * K + first + k) * P + p) * Q + q + j] = sums[j][k];
                }
    }
}

/* grad: [N, K, P, Q]; dw: [K, C, R, S]; db: [K]; scratch: [N, P, Q] of kvec. Each picture is summed
 * by itself first, as long sums lose digits. */
void packhorse_convolve_weights(const float *grad, const float *x, float *dw, float *db,
                                float *scratch)
{
    kvec *turned = (kvec *)scratch;
    for (int block = 0; block < BLOCKS(K); block++) {
        const int first = block * SOME(K), many = LEAST(K - first, SOME(K));
        kvec biases = {0};
        for (int n = 0; n < N; n++) {
            kvec own = {0};
            for (int i = 0; i < P * Q; i++) {
                kvec one = {0};
                for (int k = 0; k < many; k++) one[k] = grad[(n * K + first + k) * P * Q + i];
                turned[n * P * Q + i] = one;
                own += one;
            }
            biases += own;
        }
        for (int k = 0; k < many; k++) db[first + k] = biases[k];
        for (int c = 0; c < C; c++) {
            kvec sums[R][S] = {0};
            for (int n = 0; n < N; n++) {
                kvec own[R][S] = {0};
                for (int p = 0; p < P; p++)
                    for (int q = 0; q < Q; q++) {
                        const kvec one = turned[(n * P + p) * Q + q];
                        const float *at = x + ((n * C + c) * H + p) * W + q;
                        for (int r = 0; r < R; r++)
                            for (int s = 0; s < S; s++) own[r][s] += at[r * W + s] * one;
                    }
                for (int r = 0; r < R; r++)
                    for (int s = 0; s < S; s++) sums[r][s] += own[r][s];
            }
            for (int k = 0; k < many; k++)
                for (int i = 0; i < R * S; i++)
                    dw[((first + k) * C + c) * R * S + i] = sums[i / S][i % S][k];
        }
    }
}

/* dx: [N, C, H, W]; scratch: [K, R, S] of cvec, then [H, W] of it */
void packhorse_convolve_pictures(const float *grad, const float *w, float *dx, float *scratch)
{
    cvec *turned = (cvec *)scratch, *sums = turned + K * R * S;
    for (int block = 0; block < BLOCKS(C); block++) {
        const int first = block * SOME(C), many = LEAST(C - first, SOME(C));
        for (int k = 0; k < K; k++)
            for (int i = 0; i < R * S; i++) {
                cvec one = {0};
                for (int c = 0; c < many; c++) one[c] = w[(k * C + first + c) * R * S + i];
                turned[k * R * S + i] = one;
            }
        for (int n = 0; n < N; n++) {
            for (int i = 0; i < H * W; i++) sums[i] = (cvec){0};
            for (int p = 0; p < P; p++)
                for (int q = 0; q < Q; q++) {
                    cvec own[R][S] = {0};
                    for (int k = 0; k < K; k++) {
                        const float one = grad[((n * K + k) * P + p) * Q + q];
                        for (int r = 0; r < R; r++)
                            for (int s = 0; s < S; s++)
                                own[r][s] += one * turned[(k * R + r) * S + s];
                    }
                    for (int r = 0; r < R; r++)
                        for (int s = 0; s < S; s++) sums[(p + r) * W + q + s] += own[r][s];
                }
            for (int c = 0; c < many; c++)
                for (int i = 0; i < H * W; i++) dx[(n * C + first + c) * H * W + i] = sums[i][c];
        }
    }
}
