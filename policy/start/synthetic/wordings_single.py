"""More wordings of the arena's single-step questions, one a line. `policy.start.synthetic.paraphrases` draws from
them."""

from __future__ import annotations

from collections.abc import Mapping


def lines(text: str) -> tuple[str, ...]:
    """One wording a line."""
    return tuple(line.strip() for line in text.strip().splitlines())


SINGLES: Mapping[str, tuple[str, ...]] = {
    "crates": lines("""
        {n2} baskets hold {n1} {thing} apiece. {who} eats {n3} {thing}. What number of {thing} is still there?
        A farmer named {who} loads {n2} carts, {n1} {thing} on each cart, and drops {n3}. How many arrive?
        Take {n2} rows of {n1} {thing}. Remove {n3} of them. {who} asks how many stand there now.
        {who} bought {n2} packs. One pack has {n1} {thing}. After using {n3} {thing}, what does {who} own?
        Out of {n2} drawers with {n1} {thing} inside each, {who} lent {n3}. Say how many {thing} she has at home.
        The shop got {n2} deliveries of {n1} {thing} and returned {n3}. What was the stock of {thing} for {who} then?
        Multiply {n2} by {n1} {thing}, subtract {n3}; {who} wants the remainder of the pile.
        {n2} pallets, {n1} {thing} per pallet, minus {n3} broken ones. {who} counts the good {thing}: how many?
        Every one of {n2} buckets contains {n1} {thing}; {n3} get lost on the road. Quantity remaining for {who}?
        Suppose {who} orders {n2} cartons at {n1} {thing} a carton but throws {n3} {thing} out. What is in storage?
        {who} gathered {n1} {thing} daily for {n2} days and donated {n3}. Compute the amount kept.
        Our warehouse stacks {n2} trays, with {n1} {thing} to a tray. Customers bought {n3} {thing}. What's unsold?
        Calculate {who}'s supply: {n2} sacks times {n1} {thing}, less {n3} spoiled {thing}.
        If {n3} {thing} vanish from {n2} chests of {n1} {thing} apiece, {who} ends up with what total?
        There were {n2} tables, each set with {n1} {thing}. Guests carried off {n3} of these. How big is the rest?
        {who} has {n2} bundles. In a bundle one finds {n1} {thing}. {n3} {thing} went to a neighbour. Tell me the count.
        Imagine {n2} identical bins of {n1} {thing}. {who} withdraws {n3}. State what remains altogether.
        A trader, {who}, imports {n2} lots of {n1} {thing} then ships out {n3}. Number of {thing} on hand?
        Help {who} with a count: {n1} {thing} in a bag, {n2} bags, {n3} {thing} already spent.
        {who} fills {n2} albums, {n1} {thing} an album, later tearing out {n3} {thing}. The final tally, please.
    """),
    "shares": lines("""
        {who} and others collected {n1} shells in the morning, {n2} after lunch; {n3} children get the same.
        Add {n1} cents and {n2} cents, then give {n3} people the same amount. What does {who} as one of them get?
        A prize of {n1} euros and a gift of {n2} euros go to {n3} winners alike. How much per winner, says {who}?
        {who} cooked {n1} dumplings, then {n2} dumplings. They fill {n3} plates evenly. How many lie on one plate?
        In two days {who} read {n1} pages and {n2} pages over {n3} sittings of equal length. Pages per sitting?
        Split the total of {n1} tickets and {n2} tickets fairly between {n3} classes of {who}. Tickets for a class?
        {n1} sweets plus {n2} sweets, {n3} kids, everyone is treated alike. What does a kid receive from {who}?
        Divide {n1} plus {n2} by {n3}. {who} is curious about the quotient.
        {who} picks {n1} berries, then another {n2}, and packs {n3} bowls with identical amounts. Berries in a bowl?
        Two donations, {n1} and {n2} dollars, are distributed among {n3} families by {who}. Each family's portion?
        A crew of {n3} earned {n1} dollars in May and {n2} in June. {who} pays out equal wages. What is one wage?
        What's the average load if {who} spreads {n1} bricks and {n2} bricks over {n3} trips?
        {who} inherits {n1} stamps from one aunt and {n2} from another, parted with {n3} cousins. One cousin's lot?
        Combine {n1} litres with {n2} litres, pour into {n3} cans of equal size. {who} asks how much a can contains.
        Having scored {n1} and {n2}, {who} spreads the result across {n3} games. Compute the mean for a game.
        {n3} workers, {n1} hours on one job and {n2} on another; the burden is evened out. Hours apiece?
        Please calculate {who}'s cut when {n1} coins and {n2} coins are pooled by {n3} partners in fair portions.
        {who} baked {n1} rolls at dawn, {n2} at noon. {n3} guests eat exactly alike. How many rolls per guest?
        The pot has {n1} chips; {who} throws in {n2}. Then {n3} players take identical stacks. Size of a stack?
        Allocate {n1} seats and a further {n2} seats to {n3} schools so that none is favoured. Seats for a school?
        {who} saved {n1} in spring, {n2} in autumn, and spends it over {n3} weeks at a constant pace. Weekly sum?
    """),
    "convert": lines("""
        {n1} {unit1} is how many {unit2}?
        Turn {n1} {unit1} into {unit2}, please.
        The recipe gives {n1} {unit1}. I need it in {unit2}. What do I write?
        If something takes up {n1} {unit1}, what is that in {unit2}?
        Change the unit: {n1} {unit1}, wanted in {unit2}. Number only.
        Our old plan has {n1} {unit1} on it. In {unit2} this makes how much?
        Say {n1} {unit1} with {unit2} as the unit.
        {n1} {unit1} equals what in {unit2}?
        Conversion needed: from {unit1} to {unit2}, value {n1}.
        My tool only accepts {unit2}, yet I have {n1} {unit1}. Which value should I type?
        Translate a measurement of {n1} {unit1} so it is stated using {unit2}.
        A customer ordered {n1} {unit1}. Our system counts {unit2}. What quantity do we enter?
        Rewrite {n1} {unit1}; the scale must be {unit2}.
        Could you tell me the {unit2} equivalent of {n1} {unit1}?
        {n1} {unit1}. Same thing, but {unit2}?
        Calculate: {unit2} corresponding to {n1} {unit1}.
        Someone wrote {n1} {unit1} where {unit2} were asked for. Correct the figure.
        For a report I have to present {n1} {unit1} as {unit2}. Which figure goes in?
        Suppose the total comes to {n1} {unit1}. Expressed by way of {unit2}, what would it be?
        Do the unit change: {n1} {unit1} -> {unit2}.
        Let us measure {n1} {unit1} using {unit2}. What do we read?
    """),
    "mixed": lines("""
        {n1} {unit1} and {n2} {unit2}: how many {unit2} is that in total?
        Add up {n1} {unit1} and {n2} {unit2}; the total should be given in {unit2}.
        How much is {n1} {unit1} with {n2} {unit2} on top, told in {unit2}?
        A record of {n1} {unit1} {n2} {unit2} must go into a column for {unit2}. Which number belongs there?
        My watch shows {n1} {unit1} and then {n2} {unit2} more. Convert all of this to {unit2}.
        Sum of {n1} {unit1} and {n2} {unit2} as a plain count of {unit2}?
        Collapse {n1} {unit1} {n2} {unit2} to a single figure of {unit2}.
        We used {n1} {unit1}, then a further {n2} {unit2}. Overall consumption, measured in {unit2}?
        Length, weight or time, it says {n1} {unit1} {n2} {unit2}; state the lot in {unit2}.
        Combine {n1} {unit1} with {n2} {unit2} and report {unit2}.
        {n1} {unit1} {n2} {unit2} = ? {unit2}
        Please merge both amounts, {n1} {unit1} and {n2} {unit2}, under the smaller unit, {unit2}.
        What do {n1} {unit1} along with {n2} {unit2} come to when only {unit2} may be used?
        The parts are {n1} {unit1} and {n2} {unit2}. I want one value, unit {unit2}.
        A tailor, a cook, a runner: whoever notes {n1} {unit1} {n2} {unit2} means how many {unit2}?
        Join {n1} {unit1} to {n2} {unit2}. Our form has room for {unit2} alone.
        Altogether it took {n1} {unit1}, {n2} {unit2}. Restate this purely with {unit2}.
        Compute the {unit2} contained in {n1} {unit1} plus {n2} extra {unit2}.
        Reduce "{n1} {unit1} {n2} {unit2}" to {unit2}.
        If I have {n1} {unit1} and somebody hands me {n2} {unit2}, my {unit2} number what?
    """),
    "deadline": lines("""
        {who} borrowed a book on {date} for {n} days. When must it be back? Form: YYYY-MM-DD.
        What is the date {n} days past {date}? {who} needs it as YYYY-MM-DD.
        A visa given to {who} on {date} is good for {n} days. When does it run out (YYYY-MM-DD)?
        From {date}, {who} waits {n} days for a parcel. On what date will it come? YYYY-MM-DD.
        Add {n} days to {date} and tell {who} the date in the style YYYY-MM-DD.
        {who} plants seeds on {date} that sprout {n} days later. Write the date of sprouting, YYYY-MM-DD.
        {n} days from {date} is when? {who} expects YYYY-MM-DD.
        Our guarantee begins {date} and covers {n} days. Final date of cover, YYYY-MM-DD, for {who}?
        {who}'s holiday of {n} days opens on {date}. Compute its closing date (YYYY-MM-DD).
        Starting {date}, let {n} days go by. Which calendar date have we reached? YYYY-MM-DD, says {who}.
        {who} signed on {date} with notice of {n} days. The contract stops when? Give YYYY-MM-DD.
        Shift {date} ahead by {n} days. Output YYYY-MM-DD.
        Today is {date}. {who} has an appointment in {n} days. Put its date as YYYY-MM-DD.
        Milk bought by {who} on {date} stays fresh {n} days. Expiry date? YYYY-MM-DD
        Schedule: kickoff {date}, duration {n} days, owner {who}. Finish date in YYYY-MM-DD?
        {who} will retire {n} days after {date}. Name that date, formatted YYYY-MM-DD.
        Please move the meeting of {date} back by {n} days for {who}. New date: YYYY-MM-DD.
        {n} days of quarantine for {who}, first counted from {date}. When is {who} free? YYYY-MM-DD
        The loan of {date} falls due once {n} days have elapsed. {who} must pay on what date (YYYY-MM-DD)?
    """),
    "gap": lines("""
        Count the days between {date1} and {date2}.
        What is the difference of {date2} and {date1} as a number of days?
        I was born on {date1}; my sister on {date2}. How many days younger is she?
        The strike lasted from {date1} to {date2}. Give its duration as a count of days.
        It was {date1} when we ordered and {date2} when the box came. How many days did that take?
        How long, in days, is the stretch of time that starts {date1} and stops {date2}?
        Since {date1}, how many days had gone by on {date2}?
        {date1} to {date2}: number of days?
        Subtract {date1} from {date2}; I want days.
        The tree was planted {date1} and cut {date2}. Its age in days, please.
        From opening ({date1}) to closing ({date2}), the fair ran how many days?
        Someone slept badly ever since {date1}; it ended {date2}. Tell me how many nights were bad.
        Calculate the interval separating {date1} and {date2}. Unit: days.
        A project kicked off {date1} and wrapped up {date2}. How many calendar days elapsed?
        Our cat ran away on {date1} and returned {date2}. For what number of days was it missing?
        On {date1} the deposit was made, on {date2} it was withdrawn. Days in the account?
        Days elapsed: first date {date1}, second date {date2}.
        How far apart, counted by days, are {date1} and {date2}?
        If today were {date1}, how many days would I wait for {date2}?
        The bridge was shut {date1}; traffic resumed {date2}. Length of the closure in days?
        Determine how many days {date2} comes after {date1}.
    """),
    "cell": lines("""
        Table of goods, first column price, last column stock: {rows}. Look up the stock for {thing}.
        {rows}. These are prices and stocks. How many {thing} are in stock?
        A store lists price, stock for everything it has: {rows}. The number of {thing} in store is what?
        Here are rows of name, price, stock: {rows}. From the row of {thing}, read the stock.
        Find {thing} in this table and tell me how much of it there is (price, stock): {rows}.
        Inventory (item: price, units on hand): {rows}. Units on hand of {thing}?
        How many units of {thing} do we hold? Data, price then quantity: {rows}.
        Check the second figure behind {thing}: {rows}.
        {rows}. Columns: cost, quantity. Tell me the quantity listed for {thing}.
        Could you see what amount of {thing} is available? The catalogue, with price and amount: {rows}.
        Our shop keeps this record, price before supply: {rows}. Supply of {thing}, please.
        In the warehouse register ({rows}) a line has price and count. What count belongs to {thing}?
        Look at {thing}. What remains of it in the depot? Lines show price, remaining: {rows}.
        Extract the stock value for {thing} out of these price, stock pairs: {rows}.
        A clerk asks how much {thing} is stored. He holds this register of price, store: {rows}.
        Read off: {thing}, last column. {rows}. First column is price.
        {thing}: how many left on the shelf? Price and shelf count per article: {rows}.
        I'm checking supplies. For {thing}, which stock number appears in {rows}, given after the price?
        From this database of price, stock entries, {rows}, fetch the stock entry of {thing}.
        Goods with two numbers, price followed by stock: {rows}. Report the latter for {thing}.
    """),
    "highest": lines("""
        Table of goods, first column price, last column stock: {rows}. Which row has the biggest price?
        {rows}. These are prices and stocks. Which thing costs the most?
        A store lists price, stock for everything it has: {rows}. What is its most expensive article?
        Here are rows of name, price, stock: {rows}. Find the name with the maximum price.
        Look for the greatest price in this table (price, stock) and name the good: {rows}.
        Inventory (item: price, units on hand): {rows}. Identify the dearest item.
        Which product is the priciest? Data, price then quantity: {rows}.
        Compare the first figures and return the article whose figure is largest: {rows}.
        {rows}. Columns: cost, quantity. What costs more than everything else?
        Could you see which of these carries the steepest price? The catalogue, with price and amount: {rows}.
        Our shop keeps this record, price before supply: {rows}. Its most valuable item, please.
        In the warehouse register ({rows}) a line has price and count. For what must a buyer pay the most?
        Scan the prices (they come before the stock) and say what tops them: {rows}.
        A clerk asks what sells at the largest price. He holds this register of price, store: {rows}.
        Name whatever is most expensive. {rows}. First column is price.
        Rank by price and give me only the leader. Price and shelf count per article: {rows}.
        I want to buy the single costliest thing. What would it be, given price and stock in {rows}?
        From this database of price, stock entries, {rows}, fetch the item of maximal price.
        Goods with two numbers, price followed by stock: {rows}. Where does the former peak?
        Of all these wares, one is dearer than the others: which? (price, stock) {rows}
    """),
    "backwards": lines("""
        Reverse the letters of "{word}" and use upper case.
        What is "{word}" spelled in reverse? Upper case only.
        Flip the string "{word}" and make every letter a capital.
        Starting at the end of "{word}", write letter after letter in capitals until you reach its start.
        The code is made by reversing "{word}" and writing it large, in capitals. What is the code?
        Give "{word}" in reversed order, capitals please.
        Mirror "{word}". Uppercase output.
        Invert the sequence of characters in "{word}", then uppercase everything.
        A sign seen in a mirror: "{word}" reversed, all caps. What does it show?
        Uppercase "{word}" and turn it back to front.
        "{word}" in reverse, big letters?
        Someone pronounces "{word}" the wrong way round. Put that down in capitals.
        Compute reverse("{word}").upper().
        Our secret sign is "{word}" taken in opposite direction, typed with caps lock. Type it.
        Read out the characters of "{word}", final one first, and shout them (capitals).
        Produce the reversal of the term "{word}" as uppercase text.
        Rewrite "{word}" so its tail becomes its head, every character uppercase.
        Undo the order of letters in "{word}"; caps only.
        Could you back-spell "{word}" for me? Everything upper case.
    """),
    "swap": lines("""
        Swap {letter1} for {letter2} in "{word}".
        Replace {letter1} with {letter2} everywhere in "{word}" and give the string.
        What does "{word}" turn into when every {letter1} becomes {letter2}?
        Write "{word}" again, but use {letter2} where there is a {letter1}.
        A child confuses letters: it reads {letter1} as {letter2}. How does it read "{word}"?
        Substitute the letter {letter2} for {letter1} throughout the word "{word}".
        In "{word}", exchange all {letter1} characters with {letter2}.
        Edit "{word}": {letter1} -> {letter2}.
        My keyboard prints {letter2} whenever I hit {letter1}. I type "{word}". What appears?
        Take out {letter1} from "{word}" and insert {letter2} instead, wherever it occurs.
        Encode "{word}" by turning {letter1} to {letter2}. Result?
        How is "{word}" spelled once {letter2} has taken the place of {letter1}?
        Correct the spelling of "{word}": wherever you meet {letter1}, put {letter2}.
        Apply the rule "{letter1} becomes {letter2}" to "{word}".
        Modify "{word}" so that no {letter1} survives: each turns to {letter2}.
        Compute "{word}".replace("{letter1}", "{letter2}").
        Pretend {letter1} were written {letter2}. Show me "{word}" then.
        The typist mixed up {letter1}; it must read {letter2}. Fix "{word}".
        Exchange {letter1} against {letter2} in the term "{word}"; show the outcome.
        Let {letter2} stand for {letter1}. Transform "{word}" accordingly.
    """),
    "sorting": lines("""
        Sort {nums} in descending order, with commas.
        Arrange {nums} from highest to lowest.
        Order this list, top number first: {nums}. Commas between the numbers.
        Which order do {nums} have when you start at the maximum and go down? Use commas.
        {nums}: list these again, largest first, smallest last.
        Line up the marks {nums} beginning with the greatest, comma after each.
        Rank {nums}, maximum at the front.
        Descending sort, please: {nums}.
        Rearrange {nums} so that each number is followed by a lower one. Comma separated.
        Give me {nums} in falling order.
        Our league table lists points {nums} unsorted. Bring it into decreasing order.
        From biggest down to smallest, how do {nums} go?
        Reorder the sequence {nums}; high values lead, low values trail.
        {nums} got shuffled. They used to stand tallest to shortest. Restore this.
        Place {nums} on a line, decreasing, with a comma after every entry but the final one.
        Write down {nums} starting with the maximum and finishing with the minimum.
        Compute sorted({nums}, reverse=True), comma separated.
        Organise these readings by size, the larger always before the smaller: {nums}.
        Could you tidy up {nums} by decreasing value?
        Turn {nums} into a list that goes steadily downwards.
    """),
    "evens": lines("""
        Filter {nums}: only even numbers stay. Commas between them.
        Remove the odd numbers in {nums} and list the others.
        List the even numbers among {nums} as they come, with commas.
        {nums}: copy this list without its odd members.
        Select what is divisible by two out of this list and leave its order alone: {nums}.
        I do not like odd numbers. Clean them out of {nums} for me, commas between.
        Pick every even entry of {nums}.
        Discard anything odd: {nums}. What survives, comma separated?
        Extract multiples of two, in sequence, from {nums}.
        Which members of {nums} can be halved exactly? Comma separated, no resorting.
        Go through {nums}; skip odd ones, copy even ones.
        Erase from {nums} whatever two does not divide.
        Return the even subset of {nums}, unsorted.
        Only even house numbers lie on our side. Houses: {nums}. Ours are?
        Delete odd values, {nums}, and show the remaining values with commas.
        Give the numbers of {nums} that end on 0, 2, 4, 6 or 8, in the order they have.
        Compute [x for x in ({nums}) if x % 2 == 0], comma separated.
        Throw the odd ones out, please: {nums}.
        Reduce the sequence {nums} to its even elements.
        Even numbers alone interest me. Here is everything: {nums}.
    """),
}
