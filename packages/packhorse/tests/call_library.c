/* Call a function of a shared library, which may be one for another processor, under emulation.
 *
 *     call_library LIBRARY FUNCTION < arguments > results
 *
 * An argument is a letter and what belongs to it: `l` an int64; `f` a float; `b` the size of a buffer
 * and its bytes; `p` nothing, for the entry point of OpenMP. The results are what the function
 * returned, as an int64, and the buffers as it left them.
 *
 * Integers and floats have registers of their own in the calling conventions of Linux on x86-64 and
 * ARM, so the floats may be passed last wherever they stand in the signature. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define MOST 24

/* As a team of two threads would, one after the other. */
static void parallel(void (*body)(void *), void *shared, unsigned threads, unsigned flags) {
    for (int i = 0; i < 2; i++) body(shared);
}

typedef int64_t Function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         float, float);

int main(int count, char **words) {
    void *library = count == 3 ? dlopen(words[1], RTLD_NOW) : NULL;
    Function *function = library ? (Function *)dlsym(library, words[2]) : NULL;
    if (!function) return fprintf(stderr, "%s\n", dlerror()), 1;
    int64_t a[MOST] = {0}, sizes[MOST] = {0};
    float f[2] = {0};
    int numbers = 0, floats = 0, failed = 0;
    for (int kind; (kind = getchar()) != EOF && numbers < MOST && floats < 3;) {
        if (kind == 'f') {
            failed |= fread(&f[floats++], sizeof(float), 1, stdin) != 1;
        } else if (kind == 'p') {
            a[numbers++] = (int64_t)parallel;
        } else if (kind == 'l') {
            failed |= fread(&a[numbers++], sizeof(int64_t), 1, stdin) != 1;
        } else {
            int64_t size;
            failed |= fread(&size, sizeof size, 1, stdin) != 1;
            char *bytes = malloc(size);
            failed |= fread(bytes, 1, size, stdin) != (size_t)size;
            sizes[numbers] = size;
            a[numbers++] = (int64_t)bytes;
        }
    }
    if (failed) return fprintf(stderr, "the arguments end too early\n"), 1;
    int64_t result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10],
                              a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18], a[19], a[20],
                              a[21], a[22], a[23], f[0], f[1]);
    fwrite(&result, sizeof result, 1, stdout);
    for (int i = 0; i < numbers; i++)
        if (sizes[i]) fwrite((void *)a[i], 1, sizes[i], stdout);
    return 0;
}
