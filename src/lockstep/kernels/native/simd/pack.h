// Where the rows of a piece of a weight go among a packed weight's columns.
#pragma once
#include "gemm.h"

namespace ls {
namespace LOCKSTEP_ISA {

// Which source row a column of the packed weight takes.
struct Columns {
  int64_t first, rows;
  bool interleaved;

  int64_t end() const { return first + (interleaved ? (rows + kLanes - 1) / kLanes * 2 * kLanes - kLanes : rows); }
  int64_t first_panel() const { return first / kPanel; }
  int64_t panels() const { return (end() + kPanel - 1) / kPanel - first_panel(); }
  // -1: none
  int64_t row_of(int64_t column) const {
    const int64_t i = column - first;
    if (i < 0) return -1;
    if (interleaved && i / kLanes % 2) return -1;
    const int64_t row = interleaved ? i / (2 * kLanes) * kLanes + i % kLanes : i;
    return row < rows ? row : -1;
  }
};

}  // namespace LOCKSTEP_ISA
}  // namespace ls
