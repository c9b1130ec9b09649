"""More wordings of the arena's puzzles and records, one a line, and of two questions in one."""

from __future__ import annotations

from collections.abc import Mapping

from policy.start.synthetic.wordings_single import lines

HARD: Mapping[str, tuple[str, ...]] = {
    "race": lines("""
        Five people, {names}, finished at different times. {facts}. Rank them all.
        Find the order of {names} given that {facts}.
        We have results of a chess cup for {names}: {facts}. Write the table from best to worst.
        {facts}. With this, sort {names} from champion to last.
        In the final were {names}. {facts}. Tell me the places one to five.
        From the clues {facts} deduce in which order {names} crossed the line.
        Rank {names}: {facts}.
        {names} played. {facts}. Who is best, who next, and so on down to the weakest?
        Reconstruct the standings of {names} out of these results: {facts}.
        Somebody lost the score sheet for {names}, but remembers: {facts}. Recover the ranking.
        Hints: {facts}. Players: {names}. Derive the complete ranking, strongest at the front.
        {names} went skiing against each other. Since {facts}, what was the ranking at the finish?
        Sort the competitors {names} by place. Known duels: {facts}.
        Every one of {names} ended on another rank. Use {facts} and print all ranks.
        Logic puzzle. Runners: {names}. Clues: {facts}. Sequence at the finish line?
        If {facts}, how are {names} placed, gold medal at the start, bottom at the end?
        Determine a consistent sequence for {names} such that {facts} all hold.
        The tournament of {names} produced: {facts}. Give the leaderboard from top to bottom.
        Which ranking of {names} agrees with everything here? {facts}.
        Cyclists {names} reached the goal one by one. {facts}. In what sequence?
        Put {names} on the podium and behind it: {facts}.
    """),
    "riddle": lines("""
        What is the smallest number over {n1} divisible by {n2} with remainder {n3} modulo {n4}?
        Search above {n1} for a multiple of {n2} that has remainder {n3} when {n4} divides it. Smallest one?
        A number beyond {n1} can be divided by {n2}. Divided by {n4} it leaves {n3}. Find the minimum.
        Look for x greater than {n1}, x a multiple of {n2}, x divided by {n4} leaving {n3}. Least x?
        Our house number is more than {n1}, {n2} goes into it evenly, and {n4} leaves a rest of {n3}. The smallest?
        Puzzle: least integer bigger than {n1}, no remainder by {n2}, remainder {n3} by {n4}.
        Solve: x > {n1}, x mod {n2} = 0, x mod {n4} = {n3}, x minimal.
        Guess my number! It exceeds {n1}, {n2} divides it, and dividing by {n4} gives remainder {n3}. Keep it minimal.
        Which integer past {n1} comes earliest in the table of {n2} while being {n3} more than a multiple of {n4}?
        Eggs in groups of {n2}: none over. In groups of {n4}: {n3} over. At least {n1} eggs and one. How few eggs?
        Beyond {n1}, where is the nearest number that {n2} divides exactly and that is {n3} modulo {n4}?
        The lock opens with a number higher than {n1}, divisible by {n2}, congruent to {n3} mod {n4}. Lowest candidate?
        Determine min of all k > {n1} with {n2} | k and k = {n3} (mod {n4}).
        A class has over {n1} pupils; rows of {n2} work out, rows of {n4} leave {n3} pupils. Minimal class size?
        What comes soonest after {n1} having factor {n2} and a rest of {n3} upon division through {n4}?
        My age in weeks tops {n1}. It splits by {n2}; split by {n4}, {n3} stay over. What age, at minimum?
        Give the lowest solution above {n1}: multiple of {n2}, and {n3} is left after taking out every {n4}.
        Brain teaser: bigger than {n1}, evenly cut by {n2}, cut by {n4} with {n3} remaining. Name the least.
        Coins stacked by {n2} fit; stacked by {n4}, {n3} stay behind; more than {n1} coins. Smallest hoard?
    """),
    "bill": lines("""
        Format as SURNAME, I. | YYYY-MM-DD | 0.00 the following: {who1} {who2}, {date}, {n} cents.
        {who1} {who2} was charged {n} cents on {date}. Put it in the shape SURNAME, I. | YYYY-MM-DD | 0.00.
        Turn this entry into SURNAME, I. | YYYY-MM-DD | 0.00: {n} cents, {date}, {who1} {who2}.
        I need a receipt row, SURNAME, I. | YYYY-MM-DD | 0.00. {who1} {who2} gave {n} cents on {date}.
        Record {date}, {n} cents, {who1} {who2}, with the template SURNAME, I. | YYYY-MM-DD | 0.00.
        SURNAME, I. | YYYY-MM-DD | 0.00 for {who1} {who2}, {n} cents, {date}, please.
        Bookkeeping wants SURNAME, I. | YYYY-MM-DD | 0.00. Data: customer {who1} {who2}, {n} cents, day {date}.
        Reformat: "{who1} {who2} paid {n} cents, {date}" becomes SURNAME, I. | YYYY-MM-DD | 0.00.
        Invoice: {date}; {who1} {who2}; {n} cents. Required layout: SURNAME, I. | YYYY-MM-DD | 0.00.
        How would {n} cents owed by {who1} {who2} since {date} look as SURNAME, I. | YYYY-MM-DD | 0.00?
        Please file {who1} {who2}'s debt of {n} cents, dated {date}. File format SURNAME, I. | YYYY-MM-DD | 0.00.
        Convert the invoice to our format SURNAME, I. | YYYY-MM-DD | 0.00. {n} cents, due {date}, name {who1} {who2}.
        Type a register row: SURNAME, I. | YYYY-MM-DD | 0.00. It concerns {who1} {who2}, {date}, amount {n} cents.
        An account, {who1} {who2}, was credited {n} cents at {date}. Show it like SURNAME, I. | YYYY-MM-DD | 0.00.
        On {date} came {n} cents from {who1} {who2}. Log it: SURNAME, I. | YYYY-MM-DD | 0.00.
        Fill out SURNAME, I. | YYYY-MM-DD | 0.00, where {who1} {who2} is the client, {date} the day, {n} cents the fee.
        Normalise {who1} {who2} / {date} / {n} cents to SURNAME, I. | YYYY-MM-DD | 0.00.
        Compose a statement entry, structure SURNAME, I. | YYYY-MM-DD | 0.00: {n} cents, {who1} {who2}, {date}.
    """),
    "stock": lines("""
        Format as NAME | 0000 | 0.00: {thing}, {n1} pieces, {n2} cents.
        We hold {n1} of {thing} at {n2} cents. Put it in the shape NAME | 0000 | 0.00.
        Turn this entry into NAME | 0000 | 0.00: {n2} cents for each of {n1} {thing}.
        I need a shelf tag, NAME | 0000 | 0.00, for {thing}: amount {n1}, unit price {n2} cents.
        Record {n1} times {thing}, {n2} cents apiece, with the template NAME | 0000 | 0.00.
        NAME | 0000 | 0.00 for {thing}, quantity {n1}, {n2} cents, please.
        The inventory wants NAME | 0000 | 0.00. Data: product {thing}, {n1} units, {n2} cents per unit.
        Reformat: "{n1} {thing}, {n2} cents a unit" becomes NAME | 0000 | 0.00.
        Enter {thing} ({n1} in the depot, {n2} cents) using the pattern NAME | 0000 | 0.00.
        Item: {thing}; count: {n1}; price: {n2} cents. Required layout: NAME | 0000 | 0.00.
        How would {n1} units of {thing} priced {n2} cents look as NAME | 0000 | 0.00?
        Please file {thing}, of which {n1} exist, worth {n2} cents apiece. File format NAME | 0000 | 0.00.
        Convert to our format NAME | 0000 | 0.00. Article {thing}, {n2} cents, {n1} available.
        Type a register row: NAME | 0000 | 0.00. It concerns {thing}, number {n1}, amount {n2} cents.
        Delivery: {n1} sacks {thing}, {n2} cents a sack. Show it like NAME | 0000 | 0.00.
        Today came {n1} {thing} costing {n2} cents. Log it: NAME | 0000 | 0.00.
        Fill out NAME | 0000 | 0.00, where {thing} is the ware, {n1} the supply, {n2} cents the price.
        Normalise {thing} / {n1} / {n2} cents to NAME | 0000 | 0.00.
        Compose a catalogue entry, structure NAME | 0000 | 0.00: {n2} cents, {thing}, {n1} boxes.
        Print a tag such as NAME | 0000 | 0.00 saying we sell {thing} at {n2} cents and have {n1}.
    """),
}
DOUBLE = lines("""
    First: {a} Second: {b} Answer with A; B.
    Two questions. 1) {a} 2) {b} Write both answers like A; B.
    Here is a pair of questions. First: {a} Second: {b} Put the answers in one line, A; B.
    Question one: {a} Question two: {b} Reply with A; B.
    Help me with both of these. First: {a} Second: {b} I expect A; B.
    a) {a} b) {b} Give me A; B with the answers to each.
    Solve a couple of problems. First: {a} Second: {b} Output: A; B.
    First: {a} Second: {b} Both results, please, written A; B.
    You get a pair of exercises. 1. {a} 2. {b} Combine what you find: A; B.
    Could you do these for me? First: {a} Second: {b} Then say A; B.
    My homework has a first part: {a} and a second part: {b} I hand in A; B.
    First: {a} Second: {b} Separate the results with a semicolon, A; B.
    Deal with each in turn. First: {a} Second: {b} Finally report A; B.
    Q1: {a} Q2: {b} A; B?
    Twin tasks. First: {a} Second: {b} Result line: A; B.
    Let me ask this: {a} And also this: {b} Respond A; B.
    Before lunch I need these. First: {a} Second: {b} Text me A; B.
    Here come questions, double the usual. First: {a} Second: {b} Join them as A; B.
    Work through a list of two. First: {a} Second: {b} Return A; B only.
    Start with this. {a} Continue with that. {b} End with A; B.
""")
