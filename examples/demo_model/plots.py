"""Plot shapes (plots.json) and phrase banks of the story grammar.

Mark-up: ``{a|b}`` picks one alternative (nestable), ``<slot>`` is filled from the
story's cast (fixed for the whole story) or from FRAGMENTS (picked anew each time).
A blank line is a paragraph break.  All of it was written for this project.
"""

# ruff: noqa: E501 - a sentence with its alternatives stays on one line, or it could not be read.

from __future__ import annotations

import json
from pathlib import Path

FRAGMENTS: dict[str, str] = {
    "was_glad": "{was very happy|was so happy|felt very glad|smiled a big smile|felt warm inside|was full of joy|laughed and clapped|felt happy again}",
    "was_sad": "{was very sad|felt sad|was so sad that <he> began to cry|sat down and cried|felt like crying|did not know what to do|had tears in <his> eyes}",
    "was_scared": "{was scared|felt afraid|was a little afraid|began to shake|wanted to run away|felt <his> heart beat fast}",
    "one_day": "{One day|One morning|One <weather> day|One <weather> morning|One afternoon|One evening|One day in {spring|summer|autumn}}",
    "looked": "{looked everywhere|looked and looked|looked high and low|looked all around|searched all day}",
    "thought": "{thought for a long time|thought hard|thought for a moment|sat down to think|had an idea|closed <his> eyes and thought}",
    "walked": "{walked|ran|hurried|went|skipped}",
    "nice": "{nice|kind|good|gentle|friendly|warm}",
    "pretty": "{pretty|lovely|beautiful|shiny|bright|fine}",
    "walk_see": "{The sun was shining and the birds were singing.|The wind was soft and the sky was blue.|The grass was wet and green.|It was a <weather> day.|The trees were full of leaves.|White clouds moved slowly across the sky.|There were flowers everywhere.|It was so quiet that <he> could hear the bees.}",
    "all_day": "{all day|all morning|all afternoon|until the sun went down|until it was dark|for a long time|for many hours}",
    "thanks": '{"Thank you so much!"|"Thank you, <f>!"|"Thank you! You are a good friend,"|"Oh, thank you, thank you!"|"You are so kind. Thank you,"}',
    "end_home": "{Then <h> went home and slept well.|That night, <h> slept very well.|At the end of the day, <h> walked home with a smile.|When the moon came up, <h> was fast asleep.|<He> told <his> <p> all about it, and <his> <p> gave <him> a big hug.|That night, <h> dreamed about <his> wonderful day.|<h> went to bed with a happy heart.|Then it was time to go home and eat <food>.}",
    "end_friends": "{From that day on, <h> and <f> were best friends.|After that, <h> and <f> played together every day.|<h> and <f> became good friends.|And <h> and <f> were friends forever.|They laughed and played until the stars came out.|From then on, they did everything together.|The two friends walked home together, singing a little song.}",
    "close": "{The end.|And they all lived happily ever after.|It was a very good day.|It was the best day ever.|||||}",
}

CHILD_OPENINGS: list[str] = [
    "Once upon a time, there was {a <trait> <noun>|a <size> <noun>|a <noun>} {named|called} <h>.",
    "Once upon a time, there was a <size> <noun> {named|called} <h>. <h> lived in <home>.",
    "Once upon a time, in <home>, there lived a <trait> <noun> {named|called} <h>.",
    "Once upon a time, there lived a <trait> <noun> {named|called} <h>. <He> lived in <home> with <his> <p>.",
    "There once was a <trait> <noun> {named|called} <h>. <He> lived in <home>.",
    "<h> was a <trait> <noun>. <He> lived in <home>.",
    "<h> was a <trait> and <trait2> <noun>. {Everyone liked <him>.|All the neighbors knew <him>.|<He> had many friends.}",
    "In <home>, there lived a <size> <noun> {named|called} <h>.",
    "Long ago, there was a <trait> <noun> {named|called} <h>. {Every day, <he> went out to look at the world.|<He> was always very <trait2>.|<He> was never in a hurry.}",
    "A <trait> <noun> {named|called} <h> lived in <home>.",
    "Once there was a <size> <noun> {named|called} <h> who was very <trait>.",
]

LESSONS: dict[str, str] = {
    "share": "{<h> learned that it is good to share.|<h> knew that sharing makes everyone happy.|Now <he> knew that a thing is more fun when you share it.|Sharing was better than having everything alone.}",
    "brave": "{<h> learned that being brave does not mean you are never afraid.|<h> was proud, because <he> had been brave.|Now <he> knew that <he> was stronger than <he> thought.|<h> was not afraid anymore.}",
    "help": "{<h> learned that it is good to help others.|<h> knew that helping a friend is the best thing of all.|Now <he> knew that even a small friend can be a big help.|It felt good to help.}",
    "truth": "{<h> learned that it is always best to tell the truth.|From then on, <h> always told the truth.|Telling the truth was hard, but it felt good.|<h> never told a lie again.}",
    "patient": "{<h> learned to be patient.|<h> knew that good things take time.|Now <he> knew that waiting can be worth it.|Good things come to those who wait.}",
    "try": "{<h> learned that you should never give up.|<h> knew that trying again is how you learn.|Now <he> knew that practice makes everything easier.|<h> was glad that <he> did not give up.}",
    "careful": "{<h> learned to be more careful.|From then on, <h> always listened to <his> <p>.|After that, <h> never went too far from home again.|<h> promised to be careful next time.}",
    "kind": "{<h> learned that a kind word can change everything.|<h> knew that being kind makes the world better.|Now <he> knew that everyone needs a friend.|Being kind was the best thing <he> could do.}",
    "sorry": "{<h> learned that saying sorry can make things right.|<h> felt much better after <he> said sorry.|Now <he> knew that good friends can forgive.}",
}

# name -> (allowed hero kinds, lesson or "", text); kinds: c child, a animal, g grown-up, m magical being
PLOTS: dict[str, tuple[str, str, str]] = {
    name: (kinds, lesson, text)
    for name, (kinds, lesson, text) in json.loads(
        Path(__file__).with_name("plots.json").read_text("utf-8")
    ).items()
}

SKILLS = [
    "swim", "ride a bike", "fly a kite", "climb a tree", "read a book", "jump over the stream", "dance",
    "whistle", "skate on the ice", "bake bread", "paint a picture", "catch a ball", "play the drum",
    "count to ten", "tie a knot", "throw a ball",
]  # fmt: skip

SECOND_DAY: list[str] = [
    "The next day, <h> and <f> met again. {They went to <place> and looked for <col> flowers.|They made <food> together and gave some to everyone.|They built a little house out of sticks and leaves.|They told each other stories under a tree.} {It was a <weather> day.|<walk_see>} <end_friends>",
    'A week later, <f> came to visit <h> again. "{I brought you something|I have a surprise for you|Look what I have}!" said <f>. It was <a_toy>. <h> <was_glad>. {They played with it <all_day>.|"I will keep it forever," said <h>.}',
    'After that, {every <weather> day|every time they met}, <h> and <f> talked about what had happened. {"Do you remember?" asked <f>, and they both laughed.|"We were so brave," said <f>.|"That was a day to remember," said <h>.}',
]

ASIDES: list[str] = [
    "<h> liked <fruit> and <food>.", "<h> loved to {sing|dance|run|play|read|draw|laugh}.",
    "<He> always wore a <col> {hat|scarf}.", "<His> best friend was <f>.",
    "Every day <he> {helped <his> <p>|went to <place>|played outside|looked at the sky}.",
    "<h> had a <col> <toy2>.", "<h> was very <trait2>, and everyone liked <him>.",
    "<He> liked to go to <place> with <his> friend <f>.", "<h> was always {asking questions|in a good mood|ready for a new day}.",
]  # fmt: skip
