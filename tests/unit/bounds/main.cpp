#include <cstdio>

#include "bounds.h"

int main() {
  std::printf("attention %d\n", run_attention());
  std::printf("linear %d\n", run_linear());
  std::printf("sampling %d\n", run_sampling());
  std::printf("decoder %d\n", run_decoder());
}
