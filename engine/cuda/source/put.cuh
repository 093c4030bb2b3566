// Grid: (numbers of a head's tokens, key head).
  const int dim = new_keys_shape[3], tokens = new_keys_shape[2];
  const int heads = keys_shape[1], page_tokens = keys_shape[2], head = blockIdx.y;
  const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0 && head == 0) done[0] = 1;
  if (i >= (long)tokens * dim) return;
  const int token = i / dim, at = i % dim, slot = slots[token];
  const long row = ((long)(slot / page_tokens) * heads + head) * page_tokens + slot % page_tokens;
  const_cast<T*>(keys)[row * dim + at] = new_keys[
      head * new_keys_strides[1] + token * new_keys_strides[2] + at * new_keys_strides[3]];
  const_cast<T*>(values)[row * dim + at] = new_values[
      head * new_values_strides[1] + token * new_values_strides[2] + at * new_values_strides[3]];
