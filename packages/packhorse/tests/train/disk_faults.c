/* Preloaded, it counts the calls that change the disk; at the n-th one the process is killed, or the
   disk is full from then on. The libraries' own calls count too, whatever language they are written
   in. A write that is killed leaves half of its bytes behind. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, KILL, FULL };
static int mode = OFF;
static long left, seen;

void faults_arm(int new_mode, long calls) { mode = new_mode, left = calls, seen = 0; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Is this the call? Deleting needs no room, so a full disk refuses only what `grows`. */
static int strikes(int grows) {
    return mode != OFF && (mode == KILL || grows) && seen++ >= left;
}

static int die_or_refuse(void) {
    while (mode == KILL) kill(getpid(), SIGKILL);
    errno = ENOSPC;
    return -1;
}

ssize_t write(int file, const void *data, size_t size) {
    if (!strikes(1)) return REAL(write)(file, data, size);
    if (mode == KILL) (void)!REAL(write)(file, data, size / 2);
    return die_or_refuse();
}

#define FORWARD(type, name, grows, parameters, arguments) \
    type name parameters { return strikes(grows) ? die_or_refuse() : REAL(name) arguments; }

FORWARD(ssize_t, pwrite, 1, (int f, const void *d, size_t n, off_t at), (f, d, n, at))
FORWARD(ssize_t, pwrite64, 1, (int f, const void *d, size_t n, off64_t at), (f, d, n, at))
FORWARD(ssize_t, writev, 1, (int f, const struct iovec *parts, int n), (f, parts, n))
FORWARD(ssize_t, sendfile, 1, (int to, int from, off_t *at, size_t n), (to, from, at, n))
FORWARD(ssize_t, sendfile64, 1, (int to, int from, off64_t *at, size_t n), (to, from, at, n))
FORWARD(ssize_t, copy_file_range, 1, (int a, off64_t *x, int b, off64_t *y, size_t n, unsigned o),
        (a, x, b, y, n, o))
FORWARD(int, ftruncate, 1, (int f, off_t size), (f, size))
FORWARD(int, ftruncate64, 1, (int f, off64_t size), (f, size))
FORWARD(int, link, 1, (const char *from, const char *to), (from, to))
FORWARD(int, linkat, 1, (int a, const char *from, int b, const char *to, int o), (a, from, b, to, o))
FORWARD(int, mkdir, 1, (const char *path, mode_t bits), (path, bits))
FORWARD(int, fsync, 0, (int f), (f))
FORWARD(int, fdatasync, 0, (int f), (f))
FORWARD(int, rename, 0, (const char *from, const char *to), (from, to))
FORWARD(int, renameat, 0, (int a, const char *from, int b, const char *to), (a, from, b, to))
FORWARD(int, renameat2, 0, (int a, const char *from, int b, const char *to, unsigned o),
        (a, from, b, to, o))
FORWARD(int, unlink, 0, (const char *path), (path))
FORWARD(int, unlinkat, 0, (int folder, const char *path, int o), (folder, path, o))
FORWARD(int, rmdir, 0, (const char *path), (path))

/* Opening changes the disk where it makes a file. */
#define OPEN(name, parameters, arguments)                               \
    int name parameters {                                               \
        va_list more;                                                   \
        va_start(more, flags);                                          \
        mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                   \
        if ((flags & O_CREAT) && strikes(1)) return die_or_refuse();    \
        return REAL(name) arguments;                                    \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, bits))
OPEN(open64, (const char *path, int flags, ...), (path, flags, bits))
OPEN(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, bits))
OPEN(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, bits))
