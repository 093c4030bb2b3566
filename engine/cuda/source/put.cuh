// Grid: (numbers of a head's tokens, head).
  const int key_dim = new_keys_shape[3], value_dim = new_values_shape[3];
  const int width = key_dim > value_dim ? key_dim : value_dim, tokens = new_keys_shape[2];
  const int page_tokens = keys_shape[2], head = blockIdx.y;
  const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0 && head == 0) done[0] = 1;
  if (i >= (long)tokens * width) return;
  const int token = i / width, at = i % width, slot = slots[token];
  const long page = slot / page_tokens, place = slot % page_tokens;
  if (head < keys_shape[1] && at < key_dim)
    const_cast<T*>(keys)[((page * keys_shape[1] + head) * page_tokens + place) * key_dim + at] =
        new_keys[head * new_keys_strides[1] + token * new_keys_strides[2] +
                 at * new_keys_strides[3]];
  if (head < values_shape[1] && at < value_dim)
    const_cast<T*>(values)[((page * values_shape[1] + head) * page_tokens + place) * value_dim +
                           at] = new_values[head * new_values_strides[1] +
                                            token * new_values_strides[2] +
                                            at * new_values_strides[3]];
