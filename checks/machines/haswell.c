/* A processor with AVX2 and nothing later, at full speed: for LD_PRELOAD, by the lane `haswell`.

   On some processors Linux lets a thread turn its own CPUID instruction off (arch_prctl,
   ARCH_SET_CPUID); each use is then a SIGSEGV. On others programs are copied with a forbidden
   interrupt in its place (replace_cpuid.py), which is a SIGSEGV too. The handler executes the
   instruction and clears the features that a Haswell does not have, so that no library, compiler or
   child process sees them, whatever its own switches are. Not hidden: what the C library chose
   before this was loaded (memcpy), and XGETBV.

   fork and clone inherit the setting; execve clears it, and LD_PRELOAD sets it again. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

typedef struct { uint32_t a, b, c, d; } registers;
typedef int (*sigaction_function)(int, const struct sigaction *, struct sigaction *);

static struct sigaction others; /* the handler that the program itself has set */

static int set_action(int signal, const struct sigaction *new, struct sigaction *old) {
    return ((sigaction_function)dlsym(RTLD_NEXT, "sigaction"))(signal, new, old);
}

static void allow_cpuid(int allowed) { syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed); }

static registers cpuid(uint32_t leaf, uint32_t subleaf) {
    registers r;
    __asm__ volatile("cpuid" : "=a"(r.a), "=b"(r.b), "=c"(r.c), "=d"(r.d) : "a"(leaf), "c"(subleaf));
    return r;
}

static registers haswell(uint32_t leaf, uint32_t subleaf) {
    allow_cpuid(1);
    registers r = cpuid(leaf, subleaf);
    int intel = cpuid(0, 0).b == 0x756e6547; /* "Genu" */
    allow_cpuid(0);
    if (leaf == 1 && intel) {
        r.a = 0x306c3; /* family, model and stepping, by which compilers and OpenBLAS choose */
    } else if (leaf == 7 && subleaf == 0) {
        r.a = 0; /* no further subleaves: AVX-VNNI, AVX512-BF16, AMX-FP16 are there */
        /* FSGSBASE, BMI1, HLE, AVX2, SMEP, BMI2, ERMS, INVPCID, RTM are Haswell's. */
        r.b &= BIT(0) | BIT(3) | BIT(4) | BIT(5) | BIT(7) | BIT(8) | BIT(9) | BIT(10) | BIT(11);
        r.c = 0; /* VBMI, VAES, VNNI, BITALG, VPOPCNTDQ, ... */
        r.d &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25)); /* AMX, FP16, ... */
    } else if (leaf == 7 || (leaf >= 0x14 && leaf < 0x40000000)) {
        memset(&r, 0, sizeof r); /* tiles (0x1d, 0x1e), AVX10 (0x24), ... */
    } else if (leaf == 0xd && subleaf == 0) {
        r.a &= BIT(0) | BIT(1) | BIT(2); /* states to save: x87, SSE, AVX */
    }
    return r;
}

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *at = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *instruction = (const unsigned char *)at[REG_RIP];
    /* The kernel's own faults have no address, so the instruction can be read only then. */
    if (info->si_code == SI_KERNEL && instruction[1] == 0xa2 &&
        (instruction[0] == 0x0f || instruction[0] == 0xcd)) { /* CPUID, or int 0xa2 for it */
        registers r = haswell((uint32_t)at[REG_RAX], (uint32_t)at[REG_RCX]);
        at[REG_RAX] = r.a;
        at[REG_RBX] = r.b;
        at[REG_RCX] = r.c;
        at[REG_RDX] = r.d;
        at[REG_RIP] += 2;
    } else if (others.sa_flags & SA_SIGINFO) {
        others.sa_sigaction(signal, info, context);
    } else if (others.sa_handler != SIG_DFL && others.sa_handler != SIG_IGN) {
        others.sa_handler(signal);
    } else { /* a real fault: it happens again when this returns, and ends the process */
        struct sigaction end = {.sa_handler = SIG_DFL};
        set_action(SIGSEGV, &end, NULL);
    }
}

/* Handlers for SIGSEGV that the program sets (faulthandler, compilers) come after ours. */
int sigaction(int number, const struct sigaction *new, struct sigaction *old) {
    if (number != SIGSEGV) return set_action(number, new, old);
    struct sigaction before = others;
    if (new) others = *new;
    if (old) *old = before;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction new = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    return sigaction(number, &new, &old) ? SIG_ERR : old.sa_handler;
}

__attribute__((constructor)) static void start(void) {
    /* NODEFER: CPUID in the program's own handler faults as well. */
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    set_action(SIGSEGV, &ours, NULL);
    allow_cpuid(0);
}
