// Short bursts of what bounds a product on this machine: reading memory, and multiply-accumulate instructions that
// wait for nothing. kernels.py times them and takes the best, in the same run as the kernels. x86-64 with AVX2.
#include <cstddef>
#include <cstdint>

#define FMA(sum) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #sum "\n"
#define PAIR_SUM(sum, spare) \
  "vpmaddwd %%ymm14, %%ymm15, %%ymm" #spare "\n vpaddd %%ymm" #spare ", %%ymm" #sum ", %%ymm" #sum "\n"

namespace {

void read_part(const char* begin, size_t bytes) {
  for (size_t i = 0; i + 128 <= bytes; i += 128)
    asm volatile(
        "vpaddb (%0), %%ymm0, %%ymm0\n vpaddb 32(%0), %%ymm1, %%ymm1\n"
        "vpaddb 64(%0), %%ymm2, %%ymm2\n vpaddb 96(%0), %%ymm3, %%ymm3\n" ::"r"(begin + i)
        : "xmm0", "xmm1", "xmm2", "xmm3");
}

}  // namespace

extern "C" {

void ceiling_read(const char* memory, int64_t bytes, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int part = 0; part < num_threads; ++part)
    read_part(memory + bytes / num_threads * part, size_t(bytes / num_threads));
}

// 80 float32 multiply-accumulates a round and thread.
void ceiling_fma(int64_t rounds, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int part = 0; part < num_threads; ++part)
    for (int64_t i = 0; i < rounds; ++i)
      asm volatile(FMA(0) FMA(1) FMA(2) FMA(3) FMA(4) FMA(5) FMA(6) FMA(7) FMA(8) FMA(9)::
                       : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9");
}

// 128 int16 multiply-accumulates a round and thread.
void ceiling_pair_sum(int64_t rounds, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int part = 0; part < num_threads; ++part)
    for (int64_t i = 0; i < rounds; ++i)
      asm volatile(PAIR_SUM(0, 8) PAIR_SUM(1, 9) PAIR_SUM(2, 10) PAIR_SUM(3, 11) PAIR_SUM(4, 8) PAIR_SUM(5, 9)
                       PAIR_SUM(6, 10) PAIR_SUM(7, 11)::
                           : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
                             "xmm10", "xmm11");
}

}  // extern "C"
