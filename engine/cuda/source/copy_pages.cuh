// Grid: (words of a page, pairs of pages).
  const long key_words = (long)keys_shape[1] * keys_shape[2] * keys_shape[3] * sizeof(T) / 16;
  const long value_words =
      (long)values_shape[1] * values_shape[2] * values_shape[3] * sizeof(T) / 16;
  const long word = (long)blockIdx.x * blockDim.x + threadIdx.x;
  const long from = pairs[2 * blockIdx.y], to = pairs[2 * blockIdx.y + 1];
  if (word == 0 && blockIdx.y == 0) done[0] = 1;
  uint4* key_pages = reinterpret_cast<uint4*>(const_cast<T*>(keys));
  uint4* value_pages = reinterpret_cast<uint4*>(const_cast<T*>(values));
  if (word < key_words) key_pages[to * key_words + word] = key_pages[from * key_words + word];
  if (word < value_words)
    value_pages[to * value_words + word] = value_pages[from * value_words + word];
