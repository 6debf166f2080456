/* Vectors of floats and the activations of BERT, for the C of this folder. LANES is the width. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline)) /* inlined, hot loops would compete for registers */
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

enum activation { NONE, GELU, GELU_TANH, RELU }; /* freeze.py and int8.py know them */

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE vec load(const float *from) { return *(const unaligned_vec *)from; }
INLINE void store(float *to, vec x) { *(unaligned_vec *)to = x; }
INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec larger(vec a, vec b) { /* a NaN in `a` may be lost, one in `b` never is */
#if LANES == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    ivec first = a > b;
    return (vec)((first & (ivec)a) | (~first & (ivec)b));
#endif
}

INLINE vec smaller(vec a, vec b) { return -larger(-a, -b); }

/* 2^x for x ≤ 0, to 7.5e-8, as in native.c */
INLINE vec power_of_two(vec x) {
#if LANES == 16
    const vec f = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    const float magic = 12582912.0f + 127.0f; /* 1.5 · 2^23: adding it rounds to an integer, and
                                                 leaves the biased exponent in the low bits */
    x = larger(splat(-126.75f), x);           /* there the biased exponent is 0, and so is 2^x */
    const vec shifted = (x - 0.5f) + magic, f = x - (shifted - magic);
#endif
    vec p = f * 0.00187757618f + 0.00898934425f;
    p = (((p * f + 0.0558263111f) * f + 0.240153621f) * f + 0.693153073f) * f + 0.999999925f;
#if LANES == 16
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return p * (vec)((ivec)shifted << 23);
#endif
}

/* x Φ(x) = max(x, 0) − |x| Φ(−|x|). The polynomial is log2 Φ(−a), exact at 0 and elsewhere to 3e-8
 * of a Φ(−a), half a rounding of 1; from 13.5 on Φ(−a) is 0 in a float. */
INLINE vec gelu(vec x) {
    vec a = smaller(splat(13.5f), (vec)((ivec)x & 0x7fffffff));
    vec p = a * 4.85155915e-10f - 2.74438197e-8f;
    p = ((p * a + 6.45634202e-7f) * a - 8.1828266e-6f) * a + 5.95431484e-5f;
    p = ((p * a - 2.2184549e-4f) * a - 1.17496667e-4f) * a + 7.08836829e-3f;
    p = ((p * a - 5.25371246e-2f) * a - 0.459188491f) * a - 1.15110815f;
    return larger(splat(0), x) - a * power_of_two(p * a - 1);
}

/* x / (1 + e^−2u), u = √(2/π) (x + 0.044715 x³), of |x| as above. */
INLINE vec gelu_tanh(vec x) {
    vec a = smaller(splat(13.5f), (vec)((ivec)x & 0x7fffffff));
    vec e = power_of_two(a * (-2.30220820f - 0.102943240f * a * a));
    return larger(splat(0), x) - a * e / (1 + e);
}

INLINE vec activate(vec x, enum activation activation) {
    switch (activation) {
    case GELU: return gelu(x);
    case GELU_TANH: return gelu_tanh(x);
    case RELU: return larger(splat(0), x);
    default: return x;
    }
}
