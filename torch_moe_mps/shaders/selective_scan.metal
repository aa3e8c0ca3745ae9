#include "selective_scan.h"

INSTANTIATE("selective_scan", selective_scan<MOE_DTYPE>)
