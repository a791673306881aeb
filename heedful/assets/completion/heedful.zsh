#compdef heedful
# Completion of heedful @VERSION@ in zsh. Written by: heedful completion zsh

_heedful_table() {
    table=
    case $1 in
@TABLES@
    esac
}

_heedful() {
    local cur=$PREFIX verb= table word values help rest option= wanted= row item
    local -i at=0 i
    local -a rows complete tables choices
    (( CURRENT > 2 )) && verb=$words[2]
    _heedful_table "$verb"
    if [[ -z $table ]]; then
        _files
        return
    fi
    for (( i = 3; i < CURRENT; i++ )); do
        word=$words[i]
        if [[ -n $option ]]; then
            option=
        elif [[ $word == --*=* ]]; then
            continue
        elif [[ $word == -* ]]; then
            [[ $table == *$'\n'"$word|-"* || $table == *$'\n'"?$word|-"* ]] || option=$word
        else
            (( ++at ))
        fi
    done
    if [[ -z $option && ( $cur == --*=* || ( $cur == *=* && $table == *$'\n='* ) ) ]]; then
        option=${cur%%=*}
        compset -P '*='
    fi
    if [[ -n $option ]]; then
        wanted=$option
    elif [[ $cur != -* && -n $verb ]]; then
        wanted=$(( at + 1 ))
    fi
    rows=(${(f)table})
    if [[ -n $wanted ]]; then
        for row in $rows; do
            IFS='|' read -r word values help <<< "$row"
            [[ ${word#\?} == "$wanted" || $word == "=$wanted" || ${word#\?} == "--$wanted" ]] || continue
            if [[ $values != \** ]]; then
                choices=(${=values#-})
                compadd -- $choices
                return
            fi
        done
        if [[ -n $cur && $wanted == <-> && $table == *$'\n='* ]]; then # settings as PATH=VALUE
            for row in $rows; do
                word=${row%%\|*}
                [[ $word == [?=]* || $word == --*.* ]] || continue
                word=${word#[?=]} word=${word#--}
                [[ $word == "$cur"* ]] || continue
                rest=${word#"$cur"}
                if [[ $rest == *.* ]]; then
                    item=$cur${rest%%.*}.
                else
                    item=$word=
                fi
                (( $tables[(Ie)$item] )) || tables+=("$item")
            done
            (( $#tables )) && compadd -S '' -- $tables
        fi
        _files
        return
    fi
    for row in $rows; do
        word=${row%%\|*} rest=${row#*\|}
        help=${rest#*\|}
        if [[ $word == \?* ]]; then # the end of a setting's path
            [[ $cur == --?* ]] || continue
            word=${word#\?}
        fi
        [[ $word == "$cur"* ]] || continue
        [[ -n $verb && $word != -* ]] && continue
        rest=${word#"$cur"}
        if [[ $rest == *.* ]]; then
            item=$cur${rest%%.*}.
            (( $tables[(Ie)$item] )) || tables+=("$item")
        else
            complete+=("$word:$help")
        fi
    done
    (( $#complete )) && _describe argument complete
    (( $#tables )) && compadd -S '' -- $tables
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _heedful "$@"
else
    compdef _heedful heedful
fi
