// The first part of a kernel for single tokens; ``token_tensor`` or ``token_plain`` follows, then
// ``token_end``. MLX generates the signature from the names of inputs, outputs and template
// arguments.
//
// Grid: (split, key head and part of its group, token). A token uses as many splits as it needs for
// ``span`` columns each at most, or all of them; they begin at multiples of UNIT columns. Scores
// are exponents of two: log2(e) is part of ``scale``.
  constexpr float LEAST = -1e30f, NEVER = -3e38f;
  constexpr int UNIT = 16;
  const int key_heads = keys_shape[1];
  const int splits = gridDim.x, split = blockIdx.x, token = blockIdx.z;
  const int parts = gridDim.y / key_heads, key_head = blockIdx.y / parts;
  const int head = blockIdx.y * HEADS;  // the first of the part
  const int heads = gridDim.y * HEADS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lengths[token] == 0) return;
  const int* table = pages + pages[owners[token]];
  const int begin = begins[token], stop = stops[token], start = stop - lengths[token];
  const int unit = start / UNIT, units = (stop + UNIT - 1) / UNIT - unit;
  const int used = MANY ? min(splits, (units * UNIT + span[0] - 1) / span[0]) : 1;
  if (split >= used) return;
  const int first = max(start, (unit + units * split / used) * UNIT);
  const int last = min(stop, (unit + units * (split + 1) / used) * UNIT);
  // The place of a token of the step among keys, of DIM numbers, or values, of VALUE numbers.
  const long fresh = (long)token * key_heads + key_head;
  // The place of a column among those of the pool.
  const auto pooled = [&](int page, int column) {
    return ((long)page * key_heads + key_head) * PAGE + column % PAGE;
  };
  if (BITS == 0 && split == 0 && blockIdx.y % parts == 0) {
    const int at = threadIdx.x * 8;
    // Nobody reads this column of the pool in this step.
    const long where = pooled(table[(stop - 1) / PAGE], stop - 1);
    if (at < DIM)
      *(Eight<T>*)(keys + where * DIM + at) =
          *reinterpret_cast<const Eight<T>*>(new_keys + fresh * DIM + at);
    if (at < VALUE)
      *(Eight<T>*)(values + where * VALUE + at) =
          *reinterpret_cast<const Eight<T>*>(new_values + fresh * VALUE + at);
  }
  __shared__ float all_high[WARPS][HEADS], all_sum[WARPS][HEADS];
