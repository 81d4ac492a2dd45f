#include "daemon/app/log_fields.h"

#include <gmock/gmock.h>

namespace moecached {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;

TEST(SplitFields, SeparatesTheSentenceFromItsFields) {
  const LogFields out = split_fields("session opened id=3 pid=17");
  EXPECT_EQ(out.sentence, "session opened");
  EXPECT_THAT(out.fields, ElementsAre(Pair("id", "3"), Pair("pid", "17")));
}

TEST(SplitFields, AValueReachesToTheNextField) {
  const LogFields out = split_fields("model refused name=my model.gguf reason=it is = broken, a=b");
  EXPECT_THAT(out.fields,
              ElementsAre(Pair("name", "my model.gguf"), Pair("reason", "it is = broken,"), Pair("a", "b")));
}

TEST(SplitFields, WhatIsNoFieldStaysInTheSentence) {
  for (const char* line :
       {"", "stopped", "a == b", "x+y=z", "Name=x", "=x", "2=x", "cannot start: open /a=b"}) {
    const LogFields out = split_fields(line);
    EXPECT_EQ(out.sentence, line);
    EXPECT_THAT(out.fields, IsEmpty()) << line;
  }
}

TEST(SplitFields, ALineOfFieldsAloneHasNoSentence) {
  const LogFields out = split_fields("a=1 b=");
  EXPECT_EQ(out.sentence, "");
  EXPECT_THAT(out.fields, ElementsAre(Pair("a", "1"), Pair("b", "")));
}

}  // namespace
}  // namespace moecached
