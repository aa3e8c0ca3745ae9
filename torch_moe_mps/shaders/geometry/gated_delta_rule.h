// Linear attention by the gated delta rule
#pragma once

GEOMETRY kScanRows = 16;        // rows of a head's state that a lane holds,
GEOMETRY kScanColumns = 2;      // of so many columns
GEOMETRY kScanSimdgroups = 16;  // the most that share a head, with a norm
GEOMETRY kSliceSimdgroups = 8;  // the most that share a part of a head, without one
GEOMETRY kScanTokens = 16;      // staged at a time for heads of up to 128
