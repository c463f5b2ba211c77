/*
 * Fresh tokens and generations. Real ones are random; here a name is as good as fresh when
 * nobody refers to it any more: is_token(n) and is_generation(n) say whether somebody does.
 */

byte new_token, new_generation; /* 0 again at the end of every step */

inline roll() {
    new_token = 1;
    do
    :: is_token(new_token) -> new_token++
    :: else -> break
    od;
    new_generation = 1;
    do
    :: is_generation(new_generation) -> new_generation++
    :: else -> break
    od
}

inline quiet() { said = 0; new_token = 0; new_generation = 0 }
