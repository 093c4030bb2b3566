"""The kernels in LLVM's language, and the compiler (``host_compiler``)."""
