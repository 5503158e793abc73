/* Shows a program a CPU without AVX-512, VNNI and AMX: to be preloaded into every process of a server.
 *
 * Environment variables limit the libraries that heed them (oneDNN, MKL, ATen), but not the kernels beside them:
 * OpenVINO's attention asks the CPU itself. Here the CPUID instruction faults (arch_prctl(2), ARCH_CPUID), and the
 * handler answers in its place with the bits of wider instruction sets taken out. So each program makes the
 * choices, of kernels and of precision, that it would make on an AVX2 machine. It costs a microsecond or two for
 * each CPUID, which programs execute while they start.
 *
 * x86-64 Linux, on CPUs with CPUID faulting (Intel since Ivy Bridge, AMD since Zen 2).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

/* Leaf 7: F, DQ, IFMA, PF, ER, CD, BW, VL · VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ · 4VNNIW, 4FMAPS, VP2INTERSECT,
 * AMX-BF16, FP16, AMX-TILE, AMX-INT8. Subleaf 1: AVX-VNNI, AVX512-BF16, AMX-FP16, AVX-IFMA · AVX-VNNI-INT8,
 * AVX-NE-CONVERT, AMX-COMPLEX, AVX-VNNI-INT16, AVX10. */
#define WIDE_7_EBX (BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31))
#define WIDE_7_ECX (BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14))
#define WIDE_7_EDX (BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25))
#define WIDE_7_1_EAX (BIT(4) | BIT(5) | BIT(21) | BIT(23))
#define WIDE_7_1_EDX (BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19))
#define WIDE_STATE (BIT(5) | BIT(6) | BIT(7) | BIT(17) | BIT(18)) /* of XCR0: opmask, ZMM, tiles */

struct registers {
  uint32_t eax, ebx, ecx, edx;
};

static struct sigaction others; /* what the program itself wants at SIGSEGV */

static struct registers cpuid(uint32_t leaf, uint32_t subleaf) {
  struct registers r = {leaf, 0, subleaf, 0};
  __asm__ volatile("cpuid" : "+a"(r.eax), "=b"(r.ebx), "+c"(r.ecx), "=d"(r.edx));
  return r;
}

static struct registers narrowed(uint32_t leaf, uint32_t subleaf) {
  struct registers r = cpuid(leaf, subleaf);
  if (leaf == 7 && subleaf == 0) {
    r.ebx &= ~WIDE_7_EBX;
    r.ecx &= ~WIDE_7_ECX;
    r.edx &= ~WIDE_7_EDX;
  } else if (leaf == 7 && subleaf == 1) {
    r.eax &= ~WIDE_7_1_EAX;
    r.edx &= ~WIDE_7_1_EDX;
  } else if (leaf == 0xd && subleaf == 0) {
    r.eax &= ~WIDE_STATE;
  } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) { /* tiles, AVX10 */
    r = (struct registers){0, 0, 0, 0};
  }
  return r;
}

static void pass_on(int number, siginfo_t* info, void* context) {
  if (others.sa_flags & SA_SIGINFO) {
    others.sa_sigaction(number, info, context);
  } else if (others.sa_handler != SIG_DFL && others.sa_handler != SIG_IGN) {
    others.sa_handler(number);
  } else { /* the faulting instruction is executed again, and ends the program */
    struct sigaction none = {.sa_handler = SIG_DFL};
    syscall(SYS_rt_sigaction, number, &none, NULL, 8);
  }
}

static void on_fault(int number, siginfo_t* info, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* instruction = (const uint8_t*)registers[REG_RIP];
  /* A fault at an address of memory has another code; there the instruction itself may not be readable. */
  if (info->si_code != SI_KERNEL || instruction[0] != 0x0f || instruction[1] != 0xa2) {
    pass_on(number, info, context);
    return;
  }
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1); /* of this thread */
  struct registers r = narrowed((uint32_t)registers[REG_RAX], (uint32_t)registers[REG_RCX]);
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
  registers[REG_RAX] = r.eax;
  registers[REG_RBX] = r.ebx;
  registers[REG_RCX] = r.ecx;
  registers[REG_RDX] = r.edx;
  registers[REG_RIP] += 2;
}

/* Programs that want SIGSEGV for themselves (Python's faulthandler, TVM) get what is not a CPUID. */
int sigaction(int number, const struct sigaction* action, struct sigaction* before) {
  static int (*real)(int, const struct sigaction*, struct sigaction*);
  if (!real) real = (int (*)(int, const struct sigaction*, struct sigaction*))dlsym(RTLD_NEXT, "sigaction");
  if (number != SIGSEGV) return real(number, action, before);
  if (before) *before = others;
  if (action) others = *action;
  return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
  struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
  sigaddset(&action.sa_mask, number);
  if (sigaction(number, &action, &before) != 0) return SIG_ERR;
  return before.sa_handler;
}

__attribute__((constructor)) static void narrow(void) {
  int (*real)(int, const struct sigaction*, struct sigaction*) =
      (int (*)(int, const struct sigaction*, struct sigaction*))dlsym(RTLD_NEXT, "sigaction");
  struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
  real(SIGSEGV, &ours, NULL);
  /* Threads and forked children inherit it; a program that is executed loads this library again. */
  if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0) != 0) {
    static const char message[] = "avx2_cpu: this CPU or kernel has no CPUID faulting\n";
    if (write(2, message, sizeof message - 1) < 0) _exit(127);
    _exit(127);
  }
}

/* For a check that it works: 1 if a program sees AVX2 and nothing wider. */
int sees_avx2_only(void) {
  struct registers r = cpuid(7, 0);
  return (r.ebx & BIT(5)) && !(r.ebx & WIDE_7_EBX) && !(r.ecx & WIDE_7_ECX) && !(r.edx & WIDE_7_EDX);
}
