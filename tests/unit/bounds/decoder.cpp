// Steps of small decoders: ragged batches, steps that want no token, and some that want one twice.
#include "decoder.h"

#include <algorithm>
#include <vector>

#include "bounds.h"
#include "team.h"

extern "C" {
int64_t headrace_linear_packed_bytes(const LinearWeights* weights);
void headrace_linear_pack(Team* team, const LinearWeights* weights, const uint8_t* values, const uint16_t* scales,
                          const uint16_t* minimums, const float* channel_scales, uint8_t* target);
void headrace_decoder_step(Team* team, const Decoder* decoder, const PagedCache* caches, const DecoderStep* step,
                           float* residual, float* output);
}

namespace {

constexpr int64_t kHidden = 64, kIntermediate = 96, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kBlockSize = 4;
constexpr int64_t kNumBlocks = 16, kNumLayers = 2, kPositions = 32;

// A weight of sevens in the memory that the library asks for, not a byte more.
struct Packed {
  Packed(Team& team, int64_t num_outputs, int64_t num_inputs, Gate gate)
      : weights{nullptr, nullptr, num_inputs, num_outputs, WeightFormat::kInt8Group32, gate} {
    const std::vector<uint8_t> values(size_t(num_outputs * num_inputs), 7);
    const std::vector<uint16_t> scales(size_t(num_outputs * num_inputs / 32), 0x1c00);  // 2^-8
    memory.resize(size_t(headrace_linear_packed_bytes(&weights)));
    headrace_linear_pack(&team, &weights, values.data(), scales.data(), nullptr, nullptr, memory.data());
    weights.packed = memory.data();
  }
  LinearWeights weights;
  std::vector<uint8_t> memory;
};

}  // namespace

int run_decoder() {
  Team team(2, 50, nullptr);
  const Packed qkv(team, (kHeads + 2 * kKvHeads) * kHeadDim, kHidden, kNoGate);
  const Packed query(team, kHeads * kHeadDim, kHidden, kNoGate), key(team, kKvHeads * kHeadDim, kHidden, kNoGate);
  const Packed attention_output(team, kHidden, kHeads * kHeadDim, kNoGate);
  const Packed gated(team, 2 * kIntermediate, kHidden, kSilu), down(team, kHidden, kIntermediate, kNoGate);
  const std::vector<float> norm(kHidden, 1.0f), head_norm(kHeadDim, 1.0f), table(kPositions * kHeadDim / 2, 0.5f);
  int num_steps = 0;
  for (bool has_all : {false, true}) {  // every norm and multiplier that a family may have
    const float *change_norm = has_all ? norm.data() : nullptr, *of_heads = has_all ? head_norm.data() : nullptr;
    DecoderLayer layer{{&qkv.weights}, &attention_output.weights, &gated.weights, &down.weights, norm.data(),
                       of_heads,       of_heads,                  change_norm,    norm.data(),   change_norm,
                       table.data(),   table.data(),              kHeadDim / 2,   has_all ? 3 : 0};
    std::vector<DecoderLayer> layers(kNumLayers, layer);
    const LinearWeights* const apart[kMostQkvParts] = {&query.weights, &key.weights, &key.weights};
    std::copy_n(apart, kMostQkvParts, layers[1].qkv);
    const Decoder decoder{layers.data(), kNumLayers, kHidden, kHeads, norm.data(), 1e-5f, 0.25f, has_all ? 5.0f : 0.0f,
                          has_all ? 0.5f : 1.0f};
    std::vector<std::vector<float>> memory(2 * kNumLayers,
                                           std::vector<float>(kNumBlocks * kKvHeads * kBlockSize * kHeadDim));
    std::vector<PagedCache> caches(kNumLayers);
    for (int64_t index = 0; index < kNumLayers; ++index) {
      caches[index].keys = memory[2 * index].data();
      caches[index].values = memory[2 * index + 1].data();
      caches[index].type = kFloat32;
      caches[index].num_kv_heads = kKvHeads;
      caches[index].block_size = kBlockSize;
      caches[index].head_dim = kHeadDim;
    }
    // Query tokens of each sequence; every sequence has two tokens before them, and four blocks of its own.
    for (const std::vector<int>& lengths :
         {std::vector<int>{1}, std::vector<int>{1, 1, 1, 1}, std::vector<int>{14, 1, 5}, std::vector<int>{9}}) {
      std::vector<int32_t> query_start{0}, context_lens, tables;
      std::vector<int64_t> positions, slots;
      for (int sequence = 0; sequence < int(lengths.size()); ++sequence) {
        for (int block = 0; block < 4; ++block) tables.push_back(4 * sequence + block);
        for (int token = 0; token < lengths[sequence]; ++token) {
          positions.push_back(token + 2);
          slots.push_back(4 * sequence * kBlockSize + token + 2);
        }
        query_start.push_back(int32_t(positions.size()));
        context_lens.push_back(lengths[sequence] + 2);
      }
      const int64_t num_tokens = int64_t(positions.size());
      for (const std::vector<int64_t>& rows : {std::vector<int64_t>{}, std::vector<int64_t>{num_tokens - 1},
                                               std::vector<int64_t>(size_t(num_tokens) + 3, 0)}) {
        std::vector<float> residual(size_t(num_tokens * kHidden), 0.5f), output(rows.size() * kHidden);
        const DecoderStep step{positions.data(),      slots.data(),  query_start.data(),
                               context_lens.data(),   tables.data(), 4,
                               num_tokens,            int64_t(lengths.size()),
                               rows.data(),           int64_t(rows.size())};
        headrace_decoder_step(&team, &decoder, caches.data(), &step, residual.data(), output.data());
        ++num_steps;
      }
    }
  }
  return num_steps;
}
