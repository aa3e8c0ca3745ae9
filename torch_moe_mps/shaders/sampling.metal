#include "sampling.h"

INSTANTIATE("sample_rows", sample_rows<MOE_DTYPE>)
