#include "client/ctl/table.h"

#include <gtest/gtest.h>

namespace moecached::ctl {
namespace {

TEST(HumanSize, UsesIecUnits) {
  EXPECT_EQ(human_size(0), "0 B");
  EXPECT_EQ(human_size(1023), "1023 B");
  EXPECT_EQ(human_size(1024), "1.00 KiB");
  EXPECT_EQ(human_size(1536u << 20), "1.50 GiB");
  EXPECT_EQ(human_size((std::uint64_t{1} << 30) - 1), "1.00 GiB") << "not 1024.00 MiB";
  EXPECT_EQ(human_size(UINT64_MAX), "16.00 EiB");
}

TEST(Percent, OfNothingIsADash) {
  EXPECT_EQ(percent(0, 0), "-");
  EXPECT_EQ(percent(1, 3), "33.3 %");
  EXPECT_EQ(percent(7, 7), "100.0 %");
}

TEST(HumanSeconds, HasTwoUnits) {
  EXPECT_EQ(human_seconds(4.25), "4.2s");
  EXPECT_EQ(human_seconds(67), "1m 07s");
  EXPECT_EQ(human_seconds(7500), "2h 05m");
  EXPECT_EQ(human_seconds(3 * 86400 + 4 * 3600), "3d 04h");
}

TEST(Printable, LeavesNothingThatATerminalObeys) { EXPECT_EQ(printable("a\033[2Jb\n\x7f ü"), "a?[2Jb?? ü"); }

TEST(Table, AlignsColumnsAndLeavesNoTrailingBlanks) {
  Table table({"NAME", ">COUNT", "NOTE"});
  table.add({"a", "1", ""});
  table.add({"größer", "1000", "x"});
  EXPECT_EQ(table.text(),
            "NAME    COUNT  NOTE\n"
            "a           1\n"
            "größer   1000  x\n");
}

}  // namespace
}  // namespace moecached::ctl
