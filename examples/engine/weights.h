/* Weights as floats: rows of F32, F16, BF16 and Q8_0, as GGUF and safetensors files hold them, and where they
 * lie in a slot. An engine has its own kernels in place of this; here the same few lines serve a CPU and a
 * GPU. C11, C++17 and CUDA. */
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include <math.h>
#include <moecached/moecached.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define WEIGHTS_FN static __host__ __device__ inline
#else
#define WEIGHTS_FN static inline
#endif

/* ggml's numbers, which moecached_part_info.ggml_type has for files of every kind. */
enum { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_Q8_0 = 8, TYPE_BF16 = 30, Q8_0_ELEMENTS = 32, Q8_0_BYTES = 34 };

WEIGHTS_FN float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

WEIGHTS_FN float float_of_half(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1fu, fraction = half & 0x3ffu;
  if (exponent == 0) { /* zero, or a fraction of 2^-14 */
    const float magnitude = (float)fraction / 16777216.0f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return float_of_bits(sign | wide << 23 | fraction << 13);
}

WEIGHTS_FN uint32_t u16_at(const unsigned char* at) { return at[0] | (uint32_t)at[1] << 8; }

/* 0: a type that this example does not know. */
WEIGHTS_FN uint64_t row_bytes(uint32_t type, uint64_t n) {
  if (type == TYPE_F32) return 4 * n;
  if (type == TYPE_F16 || type == TYPE_BF16) return 2 * n;
  return type == TYPE_Q8_0 ? n / Q8_0_ELEMENTS * Q8_0_BYTES : 0;
}

WEIGHTS_FN float weight_at(uint32_t type, const unsigned char* row, uint64_t i) {
  if (type == TYPE_F32) return float_of_bits(u16_at(row + 4 * i) | u16_at(row + 4 * i + 2) << 16);
  if (type == TYPE_F16) return float_of_half(u16_at(row + 2 * i));
  if (type == TYPE_BF16) return float_of_bits(u16_at(row + 2 * i) << 16);
  const unsigned char* block = row + i / Q8_0_ELEMENTS * Q8_0_BYTES;
  return float_of_half(u16_at(block)) * (float)(signed char)block[2 + i % Q8_0_ELEMENTS];
}

/* One matrix of every expert of a layer: where it lies in the part that holds it. */
struct weight {
  uint32_t type, part;
  uint64_t n_columns, n_rows;
  uint64_t offset; /* bytes, from where the expert's part begins */
};

struct moe_layer {
  struct weight gate, up, down; /* down has hidden rows of inner columns, the others the reverse */
};

/* base[p]: where part p of the expert begins, in a slot or in a copy of the file. */
WEIGHTS_FN float row_times(const struct weight* w, const unsigned char* const* base, uint64_t row,
                           const float* x) {
  const unsigned char* at = base[w->part] + w->offset + row * row_bytes(w->type, w->n_columns);
  float sum = 0;
  for (uint64_t i = 0; i < w->n_columns; ++i) sum += weight_at(w->type, at, i) * x[i];
  return sum;
}

/* Row `row` of what the expert's inner layer gives: silu(gate x) * (up x). */
WEIGHTS_FN float inner_row(const struct moe_layer* layer, const unsigned char* const* base, uint64_t row,
                           const float* x) {
  const float gate = row_times(&layer->gate, base, row, x);
  return gate / (1.0f + expf(-gate)) * row_times(&layer->up, base, row, x);
}

/* Takes the layer's parts as moecached_model_part or moecached_gpu_model_part gave them. NULL, or why this
 * example cannot compute such a layer; biases are left to engines whose models have them. */
static inline const char* describe_layer(const moecached_part_info* parts, uint32_t n,
                                         struct moe_layer* out) {
  int have_gate = 0, have_up = 0, have_down = 0;
  for (uint32_t p = 0; p < n; ++p) {
    struct weight w;
    w.type = parts[p].ggml_type;
    w.part = p;
    w.n_columns = parts[p].ne0;
    w.n_rows = parts[p].ne1;
    w.offset = 0;
    if (parts[p].kind > MOECACHED_KIND_GATE_UP) continue;
    if (row_bytes(w.type, w.n_columns) * w.n_rows != parts[p].expert_bytes)
      return "only F32, F16, BF16 and Q8_0 are known";
    if (parts[p].kind == MOECACHED_KIND_GATE_UP) { /* the rows of gate, then those of up */
      w.n_rows /= 2;
      out->gate = out->up = w;
      out->up.offset = w.n_rows * row_bytes(w.type, w.n_columns);
      have_gate = have_up = 1;
    } else {
      struct weight* to = parts[p].kind == MOECACHED_KIND_GATE ? &out->gate
                          : parts[p].kind == MOECACHED_KIND_UP ? &out->up
                                                               : &out->down;
      *to = w;
      have_gate |= parts[p].kind == MOECACHED_KIND_GATE;
      have_up |= parts[p].kind == MOECACHED_KIND_UP;
      have_down |= parts[p].kind == MOECACHED_KIND_DOWN;
    }
  }
  if (!have_gate || !have_up || !have_down) return "gate, up and down are needed";
  if (out->gate.n_columns != out->down.n_rows || out->gate.n_rows != out->down.n_columns ||
      out->up.n_columns != out->gate.n_columns || out->up.n_rows != out->gate.n_rows) {
    return "the shapes are not those of [hidden, inner] and [inner, hidden]";
  }
  return NULL;
}

#endif
