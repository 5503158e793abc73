// Short bursts of what bounds a product on this machine: reading memory, and multiply-accumulate instructions that
// wait for nothing, in the widest form that this is compiled for. ceilings.py times them. x86-64 with AVX2 at least;
// compiled together with kernels/cpu/team.cpp.
#include <cstdint>

#include "team.h"

#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AVX512F__)
#define REGISTER(number) "%%zmm" #number
constexpr int64_t kFloats = 16;
#else
#define REGISTER(number) "%%ymm" #number
constexpr int64_t kFloats = 8;
#endif

#define FMA(sum) "vfmadd231ps " REGISTER(14) ", " REGISTER(15) ", " REGISTER(sum) "\n"
#if defined(__AVX512VNNI__)
#define PAIR_SUM(sum, spare) "vpdpwssd " REGISTER(14) ", " REGISTER(15) ", " REGISTER(sum) "\n"
#elif defined(__AVXVNNI__)
#define PAIR_SUM(sum, spare) "{vex} vpdpwssd " REGISTER(14) ", " REGISTER(15) ", " REGISTER(sum) "\n"
#else
#define PAIR_SUM(sum, spare)                                                     \
  "vpmaddwd " REGISTER(14) ", " REGISTER(15) ", " REGISTER(spare) "\n vpaddd " \
  REGISTER(spare) ", " REGISTER(sum) ", " REGISTER(sum) "\n"
#endif
#if defined(__AVX512VNNI__)
#define QUAD_SUM(sum, spare) "vpdpbusd " REGISTER(14) ", " REGISTER(15) ", " REGISTER(sum) "\n"
#elif defined(__AVXVNNI__)
#define QUAD_SUM(sum, spare) "{vex} vpdpbusd " REGISTER(14) ", " REGISTER(15) ", " REGISTER(sum) "\n"
#else
#define QUAD_SUM(sum, spare)                                                       \
  "vpmaddubsw " REGISTER(14) ", " REGISTER(15) ", " REGISTER(spare) "\n vpaddw " \
  REGISTER(spare) ", " REGISTER(sum) ", " REGISTER(sum) "\n"
#endif
#define CLOBBERED \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm14", "xmm15"
#define CLEAR_FACTORS                                                                       \
  asm volatile("vxorps %%xmm14, %%xmm14, %%xmm14\n vxorps %%xmm15, %%xmm15, %%xmm15\n" ::: \
                   "xmm14", "xmm15")

void read_part(const char* begin, int64_t bytes) {
  for (int64_t i = 0; i + 128 <= bytes; i += 128)
    asm volatile(
        "vpaddb (%0), %%ymm0, %%ymm0\n vpaddb 32(%0), %%ymm1, %%ymm1\n"
        "vpaddb 64(%0), %%ymm2, %%ymm2\n vpaddb 96(%0), %%ymm3, %%ymm3\n" ::"r"(begin + i)
        : "xmm0", "xmm1", "xmm2", "xmm3");
}

void add_floats(int64_t rounds) {
  CLEAR_FACTORS;  // numbers that are subnormal would take longer
  for (int64_t i = 0; i < rounds; ++i)
    asm volatile(FMA(0) FMA(1) FMA(2) FMA(3) FMA(4) FMA(5) FMA(6) FMA(7) FMA(8) FMA(9)::: CLOBBERED);
}

void add_pairs(int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i)
    asm volatile(PAIR_SUM(0, 8) PAIR_SUM(1, 9) PAIR_SUM(2, 10) PAIR_SUM(3, 11) PAIR_SUM(4, 8) PAIR_SUM(5, 9)
                     PAIR_SUM(6, 10) PAIR_SUM(7, 11)::: CLOBBERED);
}

void add_quads(int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i)
    asm volatile(QUAD_SUM(0, 8) QUAD_SUM(1, 9) QUAD_SUM(2, 10) QUAD_SUM(3, 11) QUAD_SUM(4, 8) QUAD_SUM(5, 9)
                     QUAD_SUM(6, 10) QUAD_SUM(7, 11)::: CLOBBERED);
}

template <class Body>
void on_all(Team& team, const Body& body) {
  team.each(team.num_threads(), 1, [&](Range parts) {
    for (int64_t part = parts.first; part < parts.end; ++part) body(part);
  });
}

}  // namespace

extern "C" {

void ceiling_read(Team* team, const char* memory, int64_t bytes) {
  const int64_t part_bytes = bytes / team->num_threads();
  on_all(*team, [&](int64_t part) { read_part(memory + part * part_bytes, part_bytes); });
}

// These return how many multiply-accumulates they did.

int64_t ceiling_float(Team* team, int64_t rounds) {
  on_all(*team, [&](int64_t) { add_floats(rounds); });
  return rounds * 10 * kFloats * team->num_threads();
}

// Pairs of int16 products, in int32.
int64_t ceiling_pairs(Team* team, int64_t rounds) {
  on_all(*team, [&](int64_t) { add_pairs(rounds); });
  return rounds * 8 * 2 * kFloats * team->num_threads();
}

// Quads of products of bytes, in int16 or int32.
int64_t ceiling_quads(Team* team, int64_t rounds) {
  on_all(*team, [&](int64_t) { add_quads(rounds); });
  return rounds * 8 * 4 * kFloats * team->num_threads();
}

// int16 activations, in two halves, with int8 weights by AMX; 0 where there is none.
int64_t ceiling_amx(Team* team, int64_t rounds) {
#if defined(__AMX_INT8__)
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 0;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } configuration;
  alignas(64) static const uint8_t kNumbers[1024] = {1};
  on_all(*team, [&](int64_t) {
    asm volatile("ldtilecfg %0" ::"m"(configuration));
    asm volatile(
        "tileloadd (%0,%1,1), %%tmm4\n tileloadd (%0,%1,1), %%tmm5\n"
        "tileloadd (%0,%1,1), %%tmm6\n tileloadd (%0,%1,1), %%tmm7\n" ::"r"(kNumbers),
        "r"(int64_t(64)));
    for (int64_t i = 0; i < rounds; ++i)
      asm volatile(
          "tdpbssd %%tmm6, %%tmm4, %%tmm0\n tdpbusd %%tmm6, %%tmm5, %%tmm1\n"
          "tdpbssd %%tmm7, %%tmm4, %%tmm2\n tdpbusd %%tmm7, %%tmm5, %%tmm3\n" ::
              : "memory");
    asm volatile("tilerelease");
  });
  return rounds * 2 * 16 * 16 * 64 * team->num_threads();
#else
  (void)team, (void)rounds;
  return 0;
#endif
}

}  // extern "C"
