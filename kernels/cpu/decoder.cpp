#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "linear_layout.h"
#include "norm.h"
#include "rotary.h"
#include "team.h"

namespace {

float* grown(std::vector<float>& vector, int64_t size) {
  if (vector.size() < size_t(size)) vector.resize(size_t(size));
  return vector.data();
}

// What lies between the layers of a step. Of the calling thread, and kept: fresh pages cost more than small steps.
struct Memory {
  std::vector<float> qkv, attended, gated, change, wanted_attended, wanted_residual;
  LinearScratch activations;
};

// One step.
class Step {
 public:
  Step(Team& team, const Decoder& decoder, const PagedCache* caches, const DecoderStep& step, float* residual, Memory& memory)
      : team_(team),
        decoder_(decoder),
        caches_(caches),
        step_(step),
        head_dim_(caches[0].head_dim),
        query_width_(decoder.num_heads * head_dim_),
        kv_width_(caches[0].num_kv_heads * head_dim_),
        qkv_width_(query_width_ + 2 * kv_width_),
        residual_(residual),
        scratch_(memory.activations) {
    const int64_t tokens = step.num_tokens, most_rows = std::max(tokens, step.num_rows);
    int64_t intermediate = 0;
    qkv_ = grown(memory.qkv, tokens * qkv_width_);
    attended_ = grown(memory.attended, tokens * query_width_);
    wanted_attended_ = grown(memory.wanted_attended, step.num_rows * query_width_);
    wanted_residual_ = grown(memory.wanted_residual, step.num_rows * decoder.hidden);
    for (int64_t index = 0; index < decoder.num_layers; ++index) {
      const DecoderLayer& layer = decoder.layers[index];
      intermediate = std::max(intermediate, layer.down->num_inputs);
      for (const LinearWeights* weights : layer.qkv)
        if (weights) scratch_.reserve(most_rows, Layout(*weights));
      for (const LinearWeights* weights : {layer.attention_output, layer.gated, layer.down})
        scratch_.reserve(most_rows, Layout(*weights));
    }
    gated_ = grown(memory.gated, most_rows * intermediate);
    change_ = grown(memory.change, most_rows * decoder.hidden);
    items_ = attention_items(attention(0));
  }

  // `output`: [num_rows, hidden], after the last norm.
  void run(float* output) const {
    const int64_t last = decoder_.num_layers - 1;
    for (int64_t index = 0; index < last; ++index) {
      attend(index);
      transform(index, attended_, residual_, step_.num_tokens);
    }
    // Of the last layer only the wanted tokens go on: a chunk of a prompt needs one, or none.
    if (step_.num_rows == 0) {
      write_keys_and_values(last);
      return;
    }
    attend(last);
    team_.each(step_.num_rows, [&](Range rows) {
      for (int64_t row = rows.first; row < rows.end; ++row) {
        const int64_t token = step_.rows[row];
        std::copy_n(attended_ + token * query_width_, query_width_, wanted_attended_ + row * query_width_);
        std::copy_n(residual_ + token * decoder_.hidden, decoder_.hidden, wanted_residual_ + row * decoder_.hidden);
      }
    });
    transform(last, wanted_attended_, wanted_residual_, step_.num_rows);
    team_.each(step_.num_rows, [&](Range rows) {
      for (int64_t row = rows.first; row < rows.end; ++row)
        rms_norm_row(wanted_residual_ + row * decoder_.hidden, decoder_.norm, decoder_.hidden, decoder_.norm_eps,
                     output + row * decoder_.hidden);
    });
  }

 private:
  PagedAttention attention(int64_t index) const {
    return {qkv_,
            qkv_width_,
            caches_[index],
            attended_,
            step_.query_start,
            step_.context_lens,
            step_.block_tables,
            step_.max_blocks,
            int(step_.num_seqs),
            int(decoder_.num_heads),
            int(decoder_.layers[index].window),
            decoder_.attention_scale,
            decoder_.attention_softcap};
  }

  void attend(int64_t index) const {
    write_keys_and_values(index);
    paged_attention(team_, attention(index), items_);
  }

  // Fills qkv_, ready for attention, and the cache.
  void write_keys_and_values(int64_t index) const {
    const DecoderLayer& layer = decoder_.layers[index];
    const LinearInput normed{residual_, decoder_.hidden, layer.input_norm, decoder_.norm_eps};
    float* columns = qkv_;
    for (const LinearWeights* part : layer.qkv) {
      if (!part) break;
      linear(team_, *part, normed, step_.num_tokens, {columns, qkv_width_, false}, scratch_);
      columns += part->num_outputs;
    }
    team_.each(step_.num_tokens, [&](Range tokens) {
      for (int64_t token = tokens.first; token < tokens.end; ++token)
        place(layer, caches_[index], token);
    });
  }

  void place(const DecoderLayer& layer, const PagedCache& cache, int64_t token) const {
    float* query = qkv_ + token * qkv_width_;
    float *key = query + query_width_, *value = key + kv_width_;
    for (float* head = query; head < key; head += head_dim_) finish_head(layer, layer.query_norm, token, head);
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      finish_head(layer, layer.key_norm, token, key + head * head_dim_);
      write_kv(cache, step_.slots[token], head, key + head * head_dim_, value + head * head_dim_);
    }
  }

  void finish_head(const DecoderLayer& layer, const float* norm, int64_t token, float* head) const {
    if (norm) rms_norm_row(head, norm, head_dim_, decoder_.norm_eps, head);
    if (!layer.cos) return;
    const int64_t row = step_.positions[token] * layer.rotary_half;
    rotate(head, layer.cos + row, layer.sin + row, layer.rotary_half);
  }

  // What comes after attention, in place on `residual`.
  void transform(int64_t index, const float* attended, float* residual, int64_t num_rows) const {
    const DecoderLayer& layer = decoder_.layers[index];
    add(*layer.attention_output, attended, layer.post_attention_norm, residual, num_rows);
    const LinearInput normed{residual, decoder_.hidden, layer.mlp_norm, decoder_.norm_eps};
    linear(team_, *layer.gated, normed, num_rows, {gated_, layer.down->num_inputs, false}, scratch_);
    add(*layer.down, gated_, layer.post_mlp_norm, residual, num_rows);
  }

  // residual += multiplier * norm(x @ weights)
  void add(const LinearWeights& weights, const float* x, const float* norm, float* residual,
           int64_t num_rows) const {
    const LinearInput input{x, weights.num_inputs, nullptr, 0.0f};
    const int64_t hidden = decoder_.hidden;
    if (!norm && decoder_.residual_multiplier == 1.0f) {
      linear(team_, weights, input, num_rows, {residual, hidden, true}, scratch_);
      return;
    }
    linear(team_, weights, input, num_rows, {change_, hidden, false}, scratch_);
    team_.each(num_rows, [&](Range rows) {
      for (int64_t row = rows.first; row < rows.end; ++row) {
        float *change = change_ + row * hidden, *running = residual + row * hidden;
        if (norm) rms_norm_row(change, norm, hidden, decoder_.norm_eps, change);
        for (int64_t i = 0; i < hidden; ++i) change[i] *= decoder_.residual_multiplier;
        for (int64_t i = 0; i < hidden; ++i) running[i] += change[i];
      }
    });
  }

  Team& team_;
  const Decoder& decoder_;
  const PagedCache* caches_;
  const DecoderStep& step_;
  const int64_t head_dim_, query_width_, kv_width_, qkv_width_;
  float *residual_, *qkv_, *attended_, *wanted_attended_, *wanted_residual_, *gated_, *change_;
  LinearScratch& scratch_;
  AttentionItems items_;
};

}  // namespace

extern "C" {

// caches: of each layer. residual: [num_tokens, hidden], the embedded tokens, changed. output: [num_rows, hidden].
void headrace_decoder_step(Team* team, const Decoder* decoder, const PagedCache* caches, const DecoderStep* step,
                           float* residual, float* output) {
  thread_local Memory of_this_thread;
  Step(*team, *decoder, caches, *step, residual, of_this_thread).run(output);
}

}  // extern "C"
