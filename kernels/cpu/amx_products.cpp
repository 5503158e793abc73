// A 16-bit activation is 256 times its high byte, which has a sign, plus its low byte, which has none. AMX sums products
// of bytes in int32; high and low sums are put together when a segment is complete.
//
// With 4-bit weights it is quicker with bfloat16: both parts, 256 times the high byte and the low byte, are bfloat16 numbers
// without rounding, and so are the weights. The sum of a segment, 32 * 15 * 32767 at most, is a whole number below 2^24:
// float sums of it are exact in any order, and both parts go into one sum.
#include "amx_products.h"

#include "integer_lanes.h"
#include "unrolled.h"

#if defined(HEADRACE_AMX)

#include <sys/syscall.h>
#include <unistd.h>

namespace {

static_assert(kIntLanes == 16 && kColumns == 3);

constexpr int64_t kRowBytes = 64;                    // of a tile
constexpr int64_t kPanelRowBytes = 4 * kPanelWidth;  // from one pair or four inputs of a panel to the next
constexpr int64_t kLeastRowsOf4Bits = 6;             // fewer rows are multiplied sooner without AMX
constexpr int64_t kLeastRowsOf8Bits = 5;

// Who holds what of the eight tiles. Of bytes: four of sums, then activations, then weights.
constexpr int kHighBytes = 4, kLowBytes = 5, kByteWeights = 6;
constexpr int kHighFloats = 3, kLowFloats = 4, kFloatWeights = 5;

template <int kTile>
HEADRACE_INLINE void load_tile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
HEADRACE_INLINE void store_tile(void* rows) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(kRowBytes), "i"(kTile) : "memory");
}
template <int kTile>
HEADRACE_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kSum, int kRows, int kWeights>
HEADRACE_INLINE void add_signed_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeights));
}
template <int kSum, int kRows, int kWeights>
HEADRACE_INLINE void add_unsigned_bytes() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeights));
}
template <int kSum, int kRows, int kWeights>
HEADRACE_INLINE void add_bfloat16s() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeights));
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

struct alignas(64) TileInMemory {
  uint8_t rows[kAmxTileRows][kRowBytes];
};

bool is_permitted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA of Linux
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

bool is_bfloat16(const Layout& layout) { return layout.value_bits == 4; }

// Inputs of one tile of activations: segments are multiples of it.
int64_t block_inputs(const Layout& layout) { return is_bfloat16(layout) || layout.segment % 64 ? 32 : 64; }

int64_t block_row_bytes(const Layout& layout) { return block_inputs(layout) * (is_bfloat16(layout) ? 2 : 1); }

void place_bfloat16s(const int16_t* values, int64_t count, uint8_t* high, uint8_t* low) {
  const __m512i byte = _mm512_set1_epi32(255);
  const auto place = [](__m512i whole_numbers, uint8_t* target) {
    const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(whole_numbers)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(bits));
  };
  for (int64_t i = 0; i < count; i += kIntLanes) {
    const __m512i x = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i)));
    place(_mm512_andnot_si512(byte, x), high + 2 * i);
    place(_mm512_and_si512(byte, x), low + 2 * i);
  }
}

// In the order of the bytes of weights: kBytesAreQuads in linear_layout.h.
void place_bytes(const int16_t* values, int64_t count, uint8_t* high, uint8_t* low) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  const auto place = [order](__m256i bytes, uint8_t* target) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm256_shuffle_epi8(bytes, order));
  };
  for (int64_t i = 0; i < count; i += 32) {
    const __m512i x = load_ints(values + i);
    place(_mm512_cvtepi16_epi8(_mm512_srai_epi16(x, 8)), high + i);
    place(_mm512_cvtepi16_epi8(x), low + i);
  }
}

// body(row) for all rows, unrolled where all are there.
template <class Body>
HEADRACE_INLINE void for_rows(int64_t num_rows, const Body& body) {
  if (num_rows == kAmxTileRows) {
    unrolled<kAmxTileRows>(body);
    return;
  }
  int64_t row = 0;
  for (; row + 4 <= num_rows; row += 4) unrolled<4>([&](auto below) HEADRACE_INLINE_BODY { body(row + below); });
  for (; row < num_rows; ++row) body(row);
}

HEADRACE_INLINE void add_scaled(Floats sum, Floats scale, float* total) {
  store_floats(total, multiply_add(sum, scale, load_floats(total)));
}

// The panel of one call, and its rows.
struct PanelProduct {
  const uint8_t* segments;
  const Layout& layout;
  const Activations& x;
  PanelTotals& sums;
  int64_t height = x.amx_height();
  int64_t block_bytes = height * block_row_bytes(layout);  // high and low parts each
  int64_t tile_bytes = height * x.num_inputs * x.value_bytes;

  const uint8_t* header(int64_t index) const { return segments + index * layout.segment_bytes; }
  const uint8_t* data(int64_t index) const { return header(index) + layout.header_bytes; }
  Floats scale(int64_t index, int column) const {
    if (layout.has_channel_scales) return broadcast_float(1.0f);
    return load_halves(reinterpret_cast<const uint16_t*>(header(index)) + column * kIntLanes);
  }
  Floats minimum(int64_t index, int column) const {
    return load_halves(reinterpret_cast<const uint16_t*>(header(index)) + kPanelWidth + column * kIntLanes);
  }
  int64_t num_rows_from(int64_t row) const { return std::min(height, x.num_rows - row); }
  float* totals(int64_t row) const { return sums.totals + row * kPanelWidth; }

  template <int kHigh, int kLow>
  HEADRACE_INLINE void load_block(const uint8_t* block) const {
    load_tile<kHigh>(block, block_row_bytes(layout));
    load_tile<kLow>(block + block_bytes, block_row_bytes(layout));
  }
};

// --- 4-bit weights

// Of the lowest four bits of each word; the instruction looks at five.
HEADRACE_INLINE __m512i as_bfloat16s(__m512i words) {
  alignas(64) static constexpr uint16_t kNumbers[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  return _mm512_permutexvar_epi16(words, load_ints(kNumbers));
}

// The weights of a segment as bfloat16 [pair of inputs][output][2].
HEADRACE_INLINE void expand_segment(const uint8_t* step, uint8_t* target) {
  for (int i = 0; i < kInputMultiple; i += 2 * kPairsPerStep) {
    unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
      const __m512i packed = load_ints(step + column * kRowBytes);
      unrolled<kPairsPerStep>([&](auto pair) HEADRACE_INLINE_BODY {
        const __m512i shifted = pair == 0 ? packed : _mm512_srli_epi16(packed, 4 * pair);
        store_ints(target + pair * kPanelRowBytes + column * kRowBytes, as_bfloat16s(shifted));
      });
    });
    step += kColumns * kRowBytes;
    target += kPairsPerStep * kPanelRowBytes;
  }
}

// Each minimum times the sum of its segment's activations, for kRows rows; `group_sums` of the first segment.
template <int kRows>
void multiply_minimums(const PanelProduct& product, const float* group_sums, float* offsets) {
  Floats sums[kRows][kColumns];
  const auto for_each = [](const auto& body) HEADRACE_INLINE_BODY {
    unrolled<kRows>([&](auto row) HEADRACE_INLINE_BODY {
      unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY { body(row, column); });
    });
  };
  for_each([&](auto row, auto column) HEADRACE_INLINE_BODY { sums[row][column] = broadcast_float(0.0f); });
  for (int64_t index = 0; index < product.layout.num_segments; ++index, group_sums += product.height) {
    Floats minimums[kColumns];
    unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY { minimums[column] = product.minimum(index, column); });
    for_each([&](auto row, auto column) HEADRACE_INLINE_BODY {
      sums[row][column] = multiply_add(broadcast_float(group_sums[row]), minimums[column], sums[row][column]);
    });
  }
  for_each([&](auto row, auto column) HEADRACE_INLINE_BODY {
    store_floats(offsets + row * kPanelWidth + column * kIntLanes, sums[row][column]);
  });
}

void multiply_minimums(const PanelProduct& product) {
  const Activations& x = product.x;
  for (int64_t first = 0; first < x.num_rows; first += product.height) {
    const float* group_sums = x.group_sums + first * x.num_groups;
    float* offsets = product.sums.offsets + first * kPanelWidth;
    const int64_t num_rows = product.num_rows_from(first);
    int64_t row = 0;
    for (; row + 8 <= num_rows; row += 8) multiply_minimums<8>(product, group_sums + row, offsets + row * kPanelWidth);
    for (; row + 3 <= num_rows; row += 3) multiply_minimums<3>(product, group_sums + row, offsets + row * kPanelWidth);
    for (; row < num_rows; ++row) multiply_minimums<1>(product, group_sums + row, offsets + row * kPanelWidth);
  }
}

// Segment by segment, each with all rows, while its weights stay in tiles. AMX takes long for a product but begins one
// soon after another: so the sums of a column are read back two products later.
void multiply_bfloat16s(const PanelProduct& product) {
  struct Finished {
    float* totals = nullptr;
    int64_t num_rows = 0;
    Floats scales[kColumns];
  } before, now;
  TileInMemory sums;
  const auto finish = [&](auto column, const Finished& of) HEADRACE_INLINE_BODY {
    store_tile<column>(&sums);
    for_rows(of.num_rows, [&](auto row) HEADRACE_INLINE_BODY {
      const Floats sum = load_floats(reinterpret_cast<const float*>(sums.rows[row]));
      add_scaled(sum, of.scales[column], of.totals + row * kPanelWidth + column * kIntLanes);
    });
  };
  alignas(64) uint8_t expanded[2][kInputMultiple / 2 * kPanelRowBytes];
  for (int64_t index = 0; index < product.layout.num_segments; ++index) {
    uint8_t* weights = expanded[index % 2];
    expand_segment(product.data(index), weights);
    unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
      load_tile<kFloatWeights + column>(weights + column * kRowBytes, kPanelRowBytes);
      now.scales[column] = product.scale(index, column);
    });
    const uint8_t* block = product.x.values + index * 2 * product.block_bytes;
    for (int64_t row = 0; row < product.x.num_rows; row += product.height, block += product.tile_bytes) {
      product.load_block<kHighFloats, kLowFloats>(block);
      now.totals = product.totals(row);
      now.num_rows = product.num_rows_from(row);
      unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
        clear_tile<column>();
        add_bfloat16s<column, kHighFloats, kFloatWeights + column>();
        add_bfloat16s<column, kLowFloats, kFloatWeights + column>();
        if constexpr (column == kColumns - 1)
          finish(Constant<0>{}, now);
        else if (before.totals)
          finish(Constant<column + 1>{}, before);
      });
      before = now;
    }
  }
  finish(Constant<1>{}, before);
  finish(Constant<2>{}, before);
}

// --- 8-bit weights

HEADRACE_INLINE void add_integers(const TileInMemory& high, const TileInMemory& low, Floats scale, float* totals,
                                  int64_t num_rows) {
  for_rows(num_rows, [&](auto row) HEADRACE_INLINE_BODY {
    const Ints sum = add(_mm512_slli_epi32(load_ints(high.rows[row]), 8), load_ints(low.rows[row]));
    add_scaled(to_floats(sum), scale, totals + row * kPanelWidth);
  });
}

// Of a tile of rows, with segments of one block. Two pairs of sums take turns: one is read back while the other is added.
void multiply_short_segments(const PanelProduct& product, int64_t row) {
  TileInMemory high, low;
  Floats scale_before;
  float* totals_before = nullptr;
  const int64_t num_rows = product.num_rows_from(row);
  const auto finish = [&](auto pair) HEADRACE_INLINE_BODY {
    store_tile<2 * pair>(&high);
    store_tile<2 * pair + 1>(&low);
    add_integers(high, low, scale_before, totals_before, num_rows);
  };
  const auto multiply = [&](auto pair, int64_t index, int column) HEADRACE_INLINE_BODY {
    constexpr int kWeights = kByteWeights + pair;
    load_tile<kWeights>(product.data(index) + column * kRowBytes, kPanelRowBytes);
    clear_tile<2 * pair>();
    clear_tile<2 * pair + 1>();
    add_signed_bytes<2 * pair, kHighBytes, kWeights>();
    add_unsigned_bytes<2 * pair + 1, kLowBytes, kWeights>();
    if (totals_before) finish(Constant<1 - pair>{});
    scale_before = product.scale(index, column);
    totals_before = product.totals(row) + column * kIntLanes;
  };
  const uint8_t* block = product.x.values + row / product.height * product.tile_bytes;
  bool is_second = false;
  for (int64_t index = 0; index < product.layout.num_segments; ++index, block += 2 * product.block_bytes) {
    product.load_block<kHighBytes, kLowBytes>(block);
    for (int column = 0; column < kColumns; ++column, is_second = !is_second)
      if (is_second)
        multiply(Constant<1>{}, index, column);
      else
        multiply(Constant<0>{}, index, column);
  }
  if (is_second)
    finish(Constant<0>{});
  else
    finish(Constant<1>{});
}

// Of a tile of rows, with segments of many blocks. Each pair of sums waits long for its last product, so there are two:
// of two columns, or of every other block.
void multiply_long_segments(const PanelProduct& product, int64_t row) {
  TileInMemory sums[4];
  const int64_t num_rows = product.num_rows_from(row), inputs = block_inputs(product.layout);
  const uint8_t* blocks = product.x.values + row / product.height * product.tile_bytes;
  for (int64_t index = 0; index < product.layout.num_segments; ++index) {
    const int64_t num_blocks = product.layout.length(index) / inputs;
    const auto multiply = [&](auto pair, int64_t block, int column) HEADRACE_INLINE_BODY {
      constexpr int kWeights = kByteWeights + pair;
      load_tile<kWeights>(product.data(index) + block * inputs * kPanelWidth + column * kRowBytes, kPanelRowBytes);
      add_signed_bytes<2 * pair, kHighBytes, kWeights>();
      add_unsigned_bytes<2 * pair + 1, kLowBytes, kWeights>();
    };
    const auto sum_blocks = [&](const auto& multiply_block) HEADRACE_INLINE_BODY {
      unrolled<4>([](auto tile) HEADRACE_INLINE_BODY { clear_tile<tile>(); });
      for (int64_t block = 0; block < num_blocks; ++block) {
        product.load_block<kHighBytes, kLowBytes>(blocks + block * 2 * product.block_bytes);
        multiply_block(block);
      }
      unrolled<4>([&](auto tile) HEADRACE_INLINE_BODY { store_tile<tile>(&sums[tile]); });
    };
    float* totals = product.totals(row);
    sum_blocks([&](int64_t block) HEADRACE_INLINE_BODY {
      multiply(Constant<0>{}, block, 0);
      multiply(Constant<1>{}, block, 1);
    });
    add_integers(sums[0], sums[1], product.scale(index, 0), totals, num_rows);
    add_integers(sums[2], sums[3], product.scale(index, 1), totals + kIntLanes, num_rows);
    sum_blocks([&](int64_t block) HEADRACE_INLINE_BODY {
      if (block % 2 == 0)
        multiply(Constant<0>{}, block, 2);
      else
        multiply(Constant<1>{}, block, 2);
    });
    for_rows(num_rows, [&](auto r) HEADRACE_INLINE_BODY {
      for (int part = 0; part < 2; ++part)
        store_ints(sums[part].rows[r], add(load_ints(sums[part].rows[r]), load_ints(sums[2 + part].rows[r])));
    });
    add_integers(sums[0], sums[1], product.scale(index, 2), totals + 2 * kIntLanes, num_rows);
    blocks += num_blocks * 2 * product.block_bytes;
  }
}

}  // namespace

bool uses_amx(const Layout& layout, int64_t num_rows) {
  if (layout.is_float || layout.has_byte_activations || layout.segment < kInputMultiple) return false;
  return num_rows >= (is_bfloat16(layout) ? kLeastRowsOf4Bits : kLeastRowsOf8Bits) && is_permitted();
}

int64_t amx_value_bytes(const Layout& layout) { return is_bfloat16(layout) ? 4 : 2; }

void place_in_amx_tile(const int16_t* values, const Layout& layout, int64_t height, int64_t row, uint8_t* tile) {
  const int64_t inputs = block_inputs(layout), bytes = block_row_bytes(layout);
  uint8_t* high = tile + row * bytes;
  for (int64_t begin = 0; begin < layout.padded_inputs; begin += inputs, high += 2 * height * bytes)
    if (is_bfloat16(layout))
      place_bfloat16s(values + begin, inputs, high, high + height * bytes);
    else
      place_bytes(values + begin, inputs, high, high + height * bytes);
}

AmxSetting::AmxSetting(const Layout& layout, const Activations& x) : is_set_(x.is_amx()) {
  if (!is_set_) return;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } configuration;
  const int64_t block_bytes = block_row_bytes(layout);
  const int first_of_rows = is_bfloat16(layout) ? kHighFloats : kHighBytes;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_sum = tile < first_of_rows, is_weight = tile >= first_of_rows + 2;
    configuration.row_bytes[tile] = uint16_t(is_sum || is_weight ? kRowBytes : block_bytes);
    configuration.rows[tile] = uint8_t(is_weight ? block_bytes / 4 : x.amx_height());
  }
  asm volatile("ldtilecfg %0" ::"m"(configuration));
}

AmxSetting::~AmxSetting() {
  if (is_set_) asm volatile("tilerelease");
}

void multiply_amx(const LinearWeights& weights, const Layout& layout, int64_t panel, const Activations& x,
                  PanelTotals& sums) {
  const PanelProduct product{weights.packed + panel * layout.panel_bytes + layout.channel_bytes, layout, x, sums};
  std::fill_n(sums.totals, x.num_rows * kPanelWidth, 0.0f);
  if (is_bfloat16(layout)) {
    multiply_minimums(product);
    multiply_bfloat16s(product);
    return;
  }
  for (int64_t row = 0; row < x.num_rows; row += product.height)
    if (layout.segment == block_inputs(layout))
      multiply_short_segments(product, row);
    else
      multiply_long_segments(product, row);
}

#else

bool uses_amx(const Layout&, int64_t) { return false; }
int64_t amx_value_bytes(const Layout&) { return 0; }
void place_in_amx_tile(const int16_t*, const Layout&, int64_t, int64_t, uint8_t*) {}
AmxSetting::AmxSetting(const Layout&, const Activations&) : is_set_(false) {}
AmxSetting::~AmxSetting() = default;
void multiply_amx(const LinearWeights&, const Layout&, int64_t, const Activations&, PanelTotals&) {}

#endif
