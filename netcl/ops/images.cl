// Kernels that fill images, launched by images.py: a work-item makes `span` neighbours of a line of the result, all of it on CPUs.
// LINE_OF(height, width) begins such a kernel, whose result has `planes` planes of this size. It defines the line, counted through all
// planes, and the first and the end of the work-item's elements.
#define LINE_OF(height, width)                                            \
  const int spans = ((width) + span - 1) / span, i = get_global_id(0);    \
  if (i >= planes * (height) * spans) return;                             \
  const int line = i / spans, begin = (i - line * spans) * span;          \
  const int end = begin + span < (width) ? begin + span : (width);
