"""The HTML report: plots drawn as inline SVG on one page that opens from disk, without scripts and
without anything from elsewhere; colours follow the reader's light or dark mode."""
