// Which process this is: the one that made a group, or a child that it has forked since.
#pragma once

#include <cstdint>

namespace meshwright {

// Counts up in every forked child; costs no kernel call.
uint64_t num_forks();

}  // namespace meshwright
